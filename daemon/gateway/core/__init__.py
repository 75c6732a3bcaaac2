"""Shared by the routes: submitting jobs, reading their events, whole and streamed responses.

`submitter` queues jobs, `event_reader` reads the events of all open requests, `waiters` passes them
to the requests, `answers` and `sse` build the responses; `state` holds all of it for one gateway.
"""
