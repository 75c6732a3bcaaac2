"""The routes of the HTTP API, one file per group of OpenAI's API.

A request body (a pydantic model that forbids unknown fields) enters and becomes the options of a
job; the job's text, vectors or state leave in OpenAI's format. `core` submits and reads the jobs.
"""
