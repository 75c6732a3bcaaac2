"""The truth in Redis: jobs, their queues, the workers that hold them, and streams of events.

The only package that imports rq and that builds Redis keys. A change of a job's life is one
transaction (`transactions`); what a killed process leaves behind is found and put right by
`workers`, `due`, `removal` and `adoption`.
"""
