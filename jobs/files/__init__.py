"""Files on disk, for all packages.

- `atomic`: atomic writes (complete or invisible after a crash), and locks
- `jsonl`: JSONL records with the place of each, for error messages
- `folders`: the files of a data folder, and those left out
- `numbers`: JSON with numbers that keep their digits
- `records`: JSON as dataclasses, checked
- `journal`: append-only files of records, cut to what a resumed job keeps
- `documents`: the text files of a folder
"""
