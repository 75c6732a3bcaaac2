"""The daemon: supervisor, Redis, zygote, workers and gateway; and the client that talks to them.

Terms, the same in code, command line, logs and docs (RQ's terms where it has one):

job               one piece of work with an id, a kind and a spec
kind              what a job does: `grpo`, …; one folder in `jobs/`
spec              all options of a job, checked before it is queued
status            queued, started, finished, failed, stopped, canceled, deferred, scheduled
execution         one attempt at a job; a job that was interrupted has several
queue             a list of waiting jobs in Redis: `train` or `infer`
worker            a light process that takes jobs from one queue and supervises their horses
zygote            the process that holds all libraries and all warm models, and forks horses
work horse        a child of the zygote that runs one job (or, resident, several concurrently)
supervisor        the process that starts, monitors and restarts the others; never imports torch
node              a daemon among those that share a Redis
leader            the node that does the common work of all nodes, elected by a lease in Redis
warm model        a model whose weights the zygote has mapped
run directory     the folder of one job: spec, events, log, checkpoints, model, result
event             one line of a job's `events.jsonl`
stream            a copy of the events in Redis for commands that follow a job; can be rebuilt
step              one optimizer update; a micro-step is one forward/backward
checkpoint        all that the next step depends on, committed to disk atomically
resume            continue from the latest checkpoint
stop / kill       save and return / end now
"""
