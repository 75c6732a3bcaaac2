"""The dashboard: one page of static files, served by the gateway.

`routes` serves the files of `site/`. Their JavaScript gets all data from the public HTTP API:
nothing is rendered here.
"""
