"""The dashboard: one page of static files, served by the gateway.

`routes` serves the files of `site/`, which get all their data from the public HTTP API: nothing is
rendered here.
"""
