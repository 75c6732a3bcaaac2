"""The gateway: the door that speaks HTTP as OpenAI's API does, in a process of its own.

It holds no model and imports no torch. Every request becomes a job like any other, and its answer
is read from that job's events, so that a gateway that dies loses no job.

__main__     the process: its socket, its report to the supervisor
app          all routes
http/        connections, authorization, bodies, errors in OpenAI's shape
api/         the routes: chat, completions, embeddings, models, files, fine-tuning, health
core/        submitting jobs, reading their events, answers whole or streamed
"""
