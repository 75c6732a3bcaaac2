"""OpenAI's graders that can be computed on this machine: JSON that scores a completion.

Enters: the JSON of a grader. Leaves: a reward function of completions and their records. `grader`
reads graders, `template` fills in their texts, `similarity` has the metrics of `text_similarity`,
`formula` the `calculate_output` of `multi`. Knows no kind and imports no torch.
"""
