"""The gateway: the door that speaks HTTP as OpenAI's API does, in a process of its own.

It holds no model and imports no torch. Every request becomes a job like any other, and its answer
is read from that job's events, so that a gateway that dies loses no job.

main         the process: its socket, its leash, its word to the supervisor
door         its connections, which do not stay open for nothing
app          the routes put together
guard        who may come in, and with how much
gate         what the routes share: the queue, the jobs under way, the thread pool
hub          one reader of the event streams of all requests
intake       from a spec to a queued job, once for each Idempotency-Key
answers      from a job's events to an answer, whole or streamed
errors       OpenAI's shape for whatever goes wrong
"""
