"""Reports on jobs of a home: functions that read run directories, and two that run scratch jobs.

`digest`, `leaderboard`, `diff` and `estimate` read; `verify_resume` and `verify_trl` train a job's
first steps again. Each has its result as a frozen dataclass. Imports no torch.
"""
