"""The HTTP gateway: a process that serves OpenAI's API.

It holds no model and imports no torch. Each request becomes a job in the queue, and the response is
read from the job's events, so no job is lost when the gateway dies.

__main__     the process: listening socket, report to the supervisor
app          the FastAPI application
http/        connection limits, authorization, request bodies, errors in OpenAI's shape
api/         the routes: chat, completions, embeddings, models, files, fine-tuning, health
core/        submitting jobs, reading their events, responses (whole or streamed)
"""
