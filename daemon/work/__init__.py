"""The worker's side: takes jobs from one queue and watches over the horses that run them.

Jobs enter from `queue.mailbox`; requests leave to the zygote; whatever ends a job becomes one
change in Redis (`attempt`). Imports no torch.
"""
