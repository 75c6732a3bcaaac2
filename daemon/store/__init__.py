"""The run store: run directories in a bucket of an S3 service.

Jobs run in their run directory on the local disk; a process of each daemon uploads what they commit
(`upload`), and a node that takes a job fetches what it lacks (`fetching`). The content of a run
directory in the bucket is what its index says (`index`). `bucket` is the only user of obstore.
"""
