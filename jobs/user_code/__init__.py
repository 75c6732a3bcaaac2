"""User code that runs inside a job: reward functions and regular expressions.

`modules` imports it afresh for each job and returns digests of its source files; `bounded_search`
limits the time of a regular expression; `forks` ends child processes that return into the job;
`tracebacks` makes its exceptions short enough for messages. `limited_processes` and its other end,
`limited_server`, run templates, schemas and tokenizer rules within limits on time and memory.
"""
