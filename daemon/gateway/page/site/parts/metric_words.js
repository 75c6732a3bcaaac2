// What each metric means, and the group of charts that it belongs to.

export const GROUPS = ["learning", "completions", "speed"];

// Metrics that tell how a run went even if they never change: they always have a chart.
const ESSENTIAL = ["reward", "loss", "success"];

// In the order of the charts.
const WORDS = {
  learning: {
    reward: "Mean reward of the completions of a step: the weighted sum of the reward functions. Held out: of the evaluation's prompts.",
    success: "Share of the episodes that ended with success, as the environment reports it.",
    loss: "Value that the optimizer minimizes. In GRPO it stays near 0 and says little: judge a run by its reward.",
    mean_token_accuracy: "Share of the tokens that the model ranks first.",
    mlm_loss: "Mean loss of the masked tokens of texts.",
    mlm_acc: "Share of the masked tokens of texts that the model ranks first.",
    mlm_mrr: "Mean reciprocal rank of the right token at masks of texts: 1 is always first.",
    mlm_hits10: "Share of the masked tokens of texts that the model ranks among its first ten.",
    mnm_loss: "Mean loss of the masked tokens of graphs.",
    mnm_acc: "Share of the masked tokens of graphs that the model ranks first.",
    mnm_mrr: "Mean reciprocal rank of the right token at masks of graphs: 1 is always first.",
    mnm_hits10: "Share of the masked tokens of graphs that the model ranks among its first ten.",
    "rewards/margins": "Mean difference between the rewards of chosen and rejected completions.",
    "rewards/accuracies": "Share of the pairs whose chosen completion has the higher reward.",
    "rewards/chosen": "Mean reward of the chosen completions: beta times the log-probability gained over the reference model.",
    "rewards/rejected": "Mean reward of the rejected completions, as of the chosen ones.",
    entropy: "Mean entropy of the next token in nats. Near 0 the completions of a group are all alike, and nothing is learned.",
    kl: "Mean KL divergence from the reference model in nats per token: how far the model has moved.",
    clip_ratio: "Share of the tokens whose probability ratio is clipped: their gradient is limited.",
    grad_norm: "Norm of the gradient before it is clipped. Peaks are unstable steps.",
    learning_rate: "Learning rate of the optimizer in this step.",
  },
  completions: {
    rewards: "Mean of each reward function, before its weight.",
    parts: "Mean of each part of the environment's reward.",
    rewards_std: "Standard deviation of each reward function over the completions of a step.",
    reward_std: "Standard deviation of the reward over the completions of a step. At 0 nothing is learned.",
    completion_length: "Mean length of the completions in tokens.",
    clipped: "Share of the completions that were cut at the maximum length. Above 0.5 the limit is too short.",
    turns: "Mean number of turns of the policy in an episode.",
    contexts: "Mean number of separate contexts in an episode.",
    ends: "Episodes of a step by the reason of their end.",
    episodes: "Number of episodes of a step.",
    observation_tokens: "Tokens that came from the environment.",
    retried: "Episodes that were played again after a failure of the environment.",
    left_out: "Groups or episodes without a usable reward: nothing is learned from them.",
  },
  speed: {
    seconds: "Duration of a step in seconds.",
    tokens: "Tokens of a step, prompts and completions.",
    generation_s: "Seconds of a step spent on generating completions.",
    training_s: "Seconds of a step spent on losses, gradients and the update.",
    environment_s: "Seconds spent in environments, summed over all processes.",
    waited_s: "Seconds of a step in which environments worked and no turn was being generated.",
    eval_s: "Duration of an evaluation in seconds.",
  },
};

const ORDER = GROUPS.flatMap((group) => Object.keys(WORDS[group]));

// `name` as in events; of the parts of a metric (`rewards.correctness`) the name before the dot.
export function wordsOf(name) {
  return GROUPS.map((group) => WORDS[group][name]).find(Boolean) ?? null;
}

export function groupOf(name) {
  return GROUPS.find((group) => name in WORDS[group]) ?? (name.endsWith("_s") ? "speed" : "learning");
}

export function rankOf(name) {
  const at = ORDER.indexOf(name);
  return at < 0 ? ORDER.length : at;
}

export function isEssential(name) {
  return ESSENTIAL.includes(name);
}
