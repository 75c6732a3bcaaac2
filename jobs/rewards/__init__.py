"""Prompts with their answers, and rewards of their completions, for GRPO and evaluations.

`problems` reads records, `prompts` tokenizes them; `rewards` has the built-in functions,
`user_rewards` those of other modules, and `reward_calls` calls them as TRL does.
"""
