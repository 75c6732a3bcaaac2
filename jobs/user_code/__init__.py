"""User code that runs inside a job: reward functions and regular expressions.

`modules` imports it afresh for each job and returns digests of its source files; `bounded_search`
limits the time of a regular expression; `forks` ends child processes that return into the job;
`tracebacks` makes its exceptions short enough for messages. `child` and its other end,
`child_server`, are a process that answers requests; `limited_processes` keeps some for templates,
schemas and tokenizer rules, with limits on time and memory.
"""
