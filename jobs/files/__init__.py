"""Files on disk, for all packages.

- `atomic`: atomic writes (complete or invisible after a crash), and locks
- `jsonl`: JSONL records with the place of each, for error messages
- `documents`: the text files of a folder
"""
