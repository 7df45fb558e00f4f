"""Metrics of what an RL stage's answers are worth: a part of `tandem.metrics.table`."""

from __future__ import annotations

from tandem.config.stages import Family
from tandem.metrics.metric import REASONS, Metric, grouped

_RL: tuple[Family, ...] = ("rl",)

# fmt: off
REWARDS = grouped("reward",
    Metric("reward", "normalized reward", _RL, "higher",
        "Mean score of the step's answers as the policy is trained on it: normalized, less the "
        "missing-EOS penalty, clipped, less grpo.overlong_penalty; KL not included. With "
        "scoring.combine `group` the weighted sum that `sum` would give: what trains then has "
        "mean 0 in every step before penalties, and is the answers' `reward` in answers.jsonl.",
        "rises; 1 is one standard deviation of the SFT policy's scores",
        chart="Reward after penalty and clipping", column="reward"),
    Metric("reward_before_penalty", "normalized reward", _RL, "higher",
        "Mean score of the step's answers before the missing-EOS penalty and clipping; "
        "comparable with `heldout_reward`.", "rises with `reward`",
        chart="Reward before penalty and clipping"),
    Metric("reward_std", "normalized reward", _RL, "",
        "Standard deviation of `reward` over the step's answers.",
        "above 0.01: equal scores teach nothing", chart="Reward standard deviation",
        line="over answers"),
    Metric("reward_token_std", "normalized reward", _RL, "",
        "Standard deviation of what functions give single tokens, weighted, over the step's "
        "tokens; where a token learns from its own rewards.",
        "above 0, or `reward_std` is: equal rewards teach nothing"),
    Metric("reward_raw", "reward units", _RL, "",
        "Mean raw score of the reward model, before normalization, clipping and penalties."),
    Metric("reward_model_score", "normalized reward", _RL, "",
        "Mean normalized score of the reward model, before its weight."),
    Metric("reward_model_disagreement", "normalized reward", _RL, "lower",
        "Standard deviation between the reward models' normalized scores of one answer, mean over "
        "answers; of the models that count, where scoring.ensemble is not their sum.",
        "stays near where it begins: models that disagree do not know the answers that they score",
        source="arXiv:2310.02743",
        chart="Disagreement of reward models"),
    Metric("reward_watched", "normalized reward", _RL, "higher",
        "Mean normalized score of the reward models of weight 0, which are only watched.",
        "rises with `reward_before_penalty`; falls where the policy learns what is wrong with "
        "what rewards it", source="arXiv:2210.10760", chart="Watched reward models"),
    Metric("reward_function_score", "function units", _RL, "",
        "Mean weighted sum of the reward functions' scores, before reward_function_weight, "
        "over the answers that one scored.", chart="Reward function"),
    Metric("reward_mean/*", "reward's own units", _RL, "",
        "Mean of one reward (a function, or the normalized reward model), before its weight, "
        "over the answers that it scored; of rewards per token an answer's sum.",
        "each rises that has a weight", title="Reward, mean", chart="Rewards, mean"),
    Metric("reward_per_token/*", "reward's own units", _RL, "", title="Reward per token",
        meaning="Mean reward of a token by a function that rewards each, before its weight."),
    Metric("reward_std/*", "reward's own units", _RL, "",
        "Standard deviation of one reward over the answers that it scored.",
        "above 0: equal scores teach nothing", title="Reward, standard deviation",
        chart="Rewards, standard deviation"),
    Metric("reward_none/*", "share", _RL, "",
        "Answers that one reward did not score: it returned None, or failed.",
        "0, unless it skips answers on purpose", title="Reward, share of None"),
    Metric("groups_without_signal", "share", _RL, "lower",
        "Prompts whose answers all score alike, of all prompts that the step answered. With a "
        "baseline of the group's own scores they teach nothing, if no KL, entropy or whitening "
        "does.", "below 0.7; near 1 the prompts are too easy or too hard",
        chart="Groups without signal", column="flat"),
    Metric("sampling_rounds", "ratio", _RL, "lower",
        "Prompts that the step answered until enough groups had a signal, over those it began "
        "with (at most grpo.sampling_rounds)."),
    Metric("reward_unscored", "answers", _RL, "",
        "Answers that no reward scored; scoring.on_none leaves them out or scores them 0.",
        "0, unless the functions skip answers on purpose"),
    Metric("reward_failed", "share", _RL, "lower",
        "Answers on which a reward function failed, for whatever reason, or a reward model that "
        "counts gave no finite score.", "0",
        title="Reward failures", chart="Reward failures"),
    Metric("conversation_answers", "answers", _RL, "", title="Answers per conversation",
        meaning="Mean number of the policy's answers in a conversation."),
    Metric("conversations_over", "share", _RL, "", chart="Ends of conversations", line="over",
        meaning="Conversations that were over: the environment said so, or with tools alone an "
        "answer called none."),
    Metric("conversations_cut", "share", _RL, "lower", chart="Ends of conversations",
        line="by a limit", healthy="near 0",
        meaning="Conversations that max_turns or max_conversation_tokens ended."),
    Metric("environment_failed", "share", _RL, "lower",
        "Conversations that ended where the environment failed: it raised, took too long, "
        "died, or its turns cannot be read or rendered.", "0", chart="Ends of conversations",
        line="by a failure"),
    Metric("tool_calls", "calls", _RL, "", "Mean number of calls of tools in a conversation.",
        chart="Calls of tools per conversation"),
    Metric("tool_calls_failed", "share", _RL, "lower",
        "Calls that failed: they cannot be read, name no tool or other arguments, or the "
        "function raised or took too long.", "falls", chart="Failed calls of tools"),
    Metric("reward_failures/*", "answers", _RL, "lower",
        "Answers on which a reward function failed, by reason: it raised, took too long, took "
        "too much memory, its process died, it started too many processes, or its result is no "
        "finite number.", "none", members=REASONS, title="Reward failures"),
    Metric("reward_seconds/*", "seconds", _RL, "lower", title="Reward, time",
        meaning="Wall time that one reward function took for the step's answers."),
    Metric("reward_clipped", "share", _RL, "lower",
        "Answers whose score reward_clip clipped (with scoring.combine `group`: would clip in "
        "`reward`).", "below 0.05"),
    Metric("shaped_return", "normalized reward", _RL, "higher",
        "Sum of an answer's rewards, mean over the answers that are learned from (with "
        "grpo.sampling_rounds not all of `reward`'s): its score minus, where the KL is in the "
        "reward, kl_coef times it by ppo.kl_estimator. With scoring.combine `group` only "
        "penalties and KL are left of it: the scores before them have mean 0.",
        "rises: the gain is worth its KL", source="arXiv:2203.02155"),
)
# fmt: on
