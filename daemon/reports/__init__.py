"""Reports on jobs of a home: functions whose results are frozen dataclasses.

`digest`, `leaderboard`, `diff` and `estimate` read run directories; `verify_resume` and
`verify_trl` train a job's first steps again. Imports no torch.
"""
