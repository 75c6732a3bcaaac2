"""Prompts with their answers, and rewards of their completions, for GRPO and evaluations.

Enters: records of a data set, and the completions of their prompts. Leaves: tokenized prompts, and
one number per completion and reward. `problems` reads records, `prompts` tokenizes them; `rewards`
has the built-in functions, `user_rewards` those of other modules; `reward_calls` adapts them to
TRL.
"""
