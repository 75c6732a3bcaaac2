"""Data sets: records of JSONL, CSV, Parquet and Arrow files, of folders and of hub data sets.

Enters: the name of a data set. Leaves: its records one by one, or tokenized examples on disk
(`corpus`). `sources` finds the files, `formats` reads records, `columns` renames their columns,
`reader` converts them to the rows of a kind. Knows no kind and imports no torch.
"""
