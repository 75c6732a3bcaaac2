"""Data sets: records of JSONL, CSV, Parquet and Arrow files, of folders and of hub data sets.

`sources` finds the files of a data set, `formats` reads their records one by one, `columns` renames
their columns, `reader` converts them to the rows of a kind. Knows no kind and imports no torch.
"""
