"""Every metric that Tandem logs: one name, one meaning, one row of a table.

docs/metrics.md, the console's columns, the report's charts, tables and cards, TensorBoard's
headings and the alarms all read it, through `tandem.metrics.names`.
"""

from __future__ import annotations

from tandem.config.stages import FAMILIES, Family
from tandem.metrics.costs import COSTS
from tandem.metrics.metric import Metric, grouped
from tandem.metrics.own import OWN
from tandem.metrics.rewards import REWARDS

_TEXT: tuple[Family, ...] = ("supervised",)
_PAIRS: tuple[Family, ...] = ("pairs",)
_BOTH: tuple[Family, ...] = ("supervised", "pairs")
_RL: tuple[Family, ...] = ("rl",)


def _and_by_dataset(metric: Metric) -> tuple[Metric, Metric]:
    meaning = f"`{metric.name}` on one data set's rows."
    return metric, Metric(f"{metric.name}/*", metric.unit, metric.families, metric.better, meaning)


# One row per metric, in the order of the reference page, the columns and the charts.
# fmt: off
METRICS: tuple[Metric, ...] = (
    Metric("loss", "nats", _BOTH, "lower",
        "Mean loss of the batch before its update: cross-entropy per trained token, or the "
        "preference loss per pair, per ranking (of a reward model, its centering term included) or "
        "per labelled answer (KTO); of a graded answer `grade_error`.", "falls, then levels off; "
        "-log sigmoid starts near 0.693, KTO near half its weights, grades near or above 1",
        chart="Loss", column="loss"),
    *_and_by_dataset(Metric("heldout_loss", "nats", _BOTH, "lower",
        "`loss` on rows that no stage trains on (a reward model's per pair, without centering and "
        "margins, or per graded answer where it learns grades by regression); `tandem eval` and "
        "reports measure the cross-entropy per token of policies.",
        "falls with the loss",
        title="held-out cross-entropy", chart="Loss", column="loss")),
    Metric("dft_loss", "nats", _TEXT, "",
        "Mean of -p log p per trained token, p its probability before the update: the loss of "
        "sft.loss dft.", "0 to 0.37; rises while unlikely tokens become possible, then falls",
        source="arXiv:2508.05629"),
    Metric("perplexity", "ratio", _TEXT, "lower", "exp(loss).", "falls", chart="Perplexity"),
    *_and_by_dataset(Metric("heldout_perplexity", "ratio", _TEXT, "lower",
        "exp(heldout_loss).", "falls; a rise means overfitting", chart="Perplexity", column="ppl",
        card=True)),
    Metric("accuracy", "share", _PAIRS, "higher",
        "Pairs whose chosen answer scores above the rejected one (DPO: by implicit reward); a tie "
        "counts half.", "0.65 to 0.95; 1.00 on training pairs alone is memorization",
        chart="Accuracy on pairs", column="acc"),
    *_and_by_dataset(Metric("heldout_accuracy", "share", _PAIRS, "higher",
        "`accuracy` on held-out pairs (KTO: over every good and every bad held-out answer, by "
        "implicit reward).", "above 0.55; noisy human labels rarely allow more than "
        "0.75", chart="Accuracy on pairs", column="acc", card=True)),
    Metric("margin", "reward units", _PAIRS, "higher",
        "Mean of chosen minus rejected score, raw units (reward models).", "grows from 0",
        chart="Margin", column="margin"),
    *_and_by_dataset(Metric("heldout_margin", "reward units", _PAIRS, "higher",
        "Mean of chosen minus rejected score (DPO: implicit reward) on held-out pairs.", "positive",
        chart="Margin", column="margin")),
    Metric("implicit_reward_margin", "reward units", _PAIRS, "higher",
        "implicit_reward_chosen minus implicit_reward_rejected.", "grows from 0",
        source="arXiv:2305.18290", chart="Margin", column="margin"),
    Metric("implicit_reward_chosen", "reward units", _PAIRS, "",
        "Mean of beta * log(policy / reference) over the chosen (KTO: good) answers; ipo takes "
        "the log-ratio per token, simpo and orpo beta times the mean log-prob of a token.",
        "near or above 0; a steep fall means that good answers become unlikely too",
        source="arXiv:2305.18290", chart="Implicit rewards", line="chosen", column="chosen"),
    Metric("implicit_reward_rejected", "reward units", _PAIRS, "",
        "The same over the rejected (KTO: bad) answers.", "falls", source="arXiv:2305.18290",
        chart="Implicit rewards", line="rejected"),
    Metric("logprob_chosen", "nats per token", _PAIRS, "higher",
        "Log-prob of a token of the chosen answers: the mean of each answer, then over answers.",
        "level; a steep fall is unlearning", chart="Log-probs of answers", line="chosen"),
    Metric("logprob_rejected", "nats per token", _PAIRS, "",
        "The same of the rejected answers.", "falls", chart="Log-probs of answers",
        line="rejected"),
    Metric("kto_baseline", "nats per answer", _PAIRS, "",
        "KTO's z: mean log(policy / reference) of answers behind prompts of other rows of the "
        "step, at least 0.", "0 at step 1, then small and positive",
        source="arXiv:2402.01306 section 4.1", chart="KTO baseline"),
    Metric("desirable_share", "share", _PAIRS, "",
        "Good answers among the step's (KTO).", "near that of the whole data"),
    Metric("score_chosen", "reward units", _PAIRS, "",
        "Mean raw score of the chosen answers (reward models).", title="Score, chosen",
        chart="Scores", line="chosen"),
    Metric("score_rejected", "reward units", _PAIRS, "",
        "Mean raw score of the rejected answers (reward models).", title="Score, rejected",
        chart="Scores", line="rejected"),
    *_and_by_dataset(Metric("heldout_calibration_error", "share", _PAIRS, "lower",
        "Expected calibration error on held-out pairs, with sigmoid(margin) as the probability "
        "that the chosen answer is better.", "below 0.1", source="arXiv:1706.04599",
        chart="Calibration error", column="calibration")),
    Metric("grade_error", "sd of grades squared", _PAIRS, "lower",
        "Mean squared error of the raw score against the grade, which has mean 0 and standard "
        "deviation 1 over its data set's trained rows (reward models on grades).",
        "falls below 1, the error of predicting the mean", source="arXiv:2406.08673",
        chart="Squared error of grades"),
    *_and_by_dataset(Metric("heldout_grade_explained", "share", _PAIRS, "higher",
        "1 - squared error of the scores / squared error of predicting the trained rows' mean, on "
        "held-out graded answers (reward models that learned grades by regression).",
        "rises above 0; below 0 the mean is the better guess", title="Held-out grades explained",
        chart="Held-out grades explained", column="grades", card=True)),
    *_and_by_dataset(Metric("heldout_grade_correlation", "ratio", _PAIRS, "higher",
        "Pearson's correlation of score and grade on held-out graded answers.",
        "rises; 0 is chance, 1 perfect", title="Held-out grades, correlation (Pearson)",
        chart="Correlation with grades", line="Pearson", card=True)),
    *_and_by_dataset(Metric("heldout_grade_rank_correlation", "ratio", _PAIRS, "higher",
        "Spearman's correlation of score and grade on held-out graded answers: Pearson's of their "
        "ranks, ties at their mean rank.", "rises; 0 is chance, 1 perfect",
        title="Held-out grades, rank correlation (Spearman)", chart="Correlation with grades",
        line="Spearman", column="rank corr", card=True)),
    Metric("center_penalty", "reward units squared", _PAIRS, "",
        "Mean of (chosen + rejected)^2 (reward models); reward.center_coef is its weight in the "
        "loss.", "small compared with the squared margin", source="arXiv:2312.09244",
        chart="Centering penalty"),
    Metric("normalize_mean", "reward units", _PAIRS, "",
        "Mean raw score of the SFT policy's answers; PPO subtracts it."),
    Metric("normalize_std", "reward units", _PAIRS, "",
        "Standard deviation of the same scores as in normalize_mean; PPO divides by it.",
        "well above 0: the reward model tells answers apart"),
    Metric("grad_norm", "norm", _BOTH, "",
        "Global L2 norm of the gradient before clipping.", "steady; no spikes above 10 times its "
        "median", title="Gradient norm", chart="Gradient norm", line="before clipping",
        column="grad"),
    Metric("learning_rate", "ratio", _BOTH, "",
        "Learning rate of this update.", chart="Learning rate", line="schedule", column="lr"),
    Metric("tokens", "tokens", _BOTH, "",
        "Tokens in this batch, padding excluded.", chart="Tokens per batch"),
    Metric("epoch", "passes", _BOTH, "",
        "Passes over the stage's data so far, as a fraction.", column="epoch"),
    *REWARDS,
    *grouped("kl",
        Metric("kl", "nats per answer", _RL, "",
            "KL from the reference to the sampling policy: log-ratio (k1) summed over an answer's "
            "tokens, mean over answers. Of both models' whole distributions at the temperature, so "
            "with top_p, top_k, min_p, penalties or a padded vocabulary, which draw from another, "
            "it is biased.",
            "0 at step 1, then grows slowly to 1 to 20; never clearly negative", source="http://joschu.net/blog/kl-approx.html",
            title="KL to the reference", chart="KL to the reference", column="kl"),
        Metric("kl_per_token", "nats per token", _RL, "", "`kl` as a mean over response tokens."),
        Metric("kl_coef", "ratio", _RL, "",
            "Weight of the KL penalty in this step.", chart="KL coefficient", line="schedule"),
        Metric("kl_loss", "nats per token", _RL, "",
            "KL term of the loss before its weight, where ppo.kl_in is `loss` or grpo.kl is in the "
            "loss.", chart="KL in the loss"),
        Metric("policy_kl", "nats per token", _RL, "",
            "KL between the sampling policy and the updated one (k3), per response token of the "
            "answers that the updates read (`answers_learned`), mean over updates; early_stop_kl "
            "stops the step's updates by it.", "0.0001 to 0.05",
            source="http://joschu.net/blog/kl-approx.html", title="KL of the update",
            chart="KL of the update", line="from the sampling policy"),
        Metric("ratio_gap_before_update", "nats", _RL, "lower",
            "Mean |log ratio| of the policy to itself before the step's first update: two forwards "
            "of the same weights.", "0 to 1e-4 in fp32, below 3e-2 in bf16",
            chart="Log-prob gap before the update", line="two forwards"),
        Metric("policy_kl_before_update", "nats per token", _RL, "lower",
            "`policy_kl` before the step's first update.", "0"),
        Metric("rollout_gap", "nats", _RL, "lower",
            "Mean |generator's log-prob - training forward's log-prob| of the sampled tokens in "
            "the step's first minibatch, before its update; where kept states are read, through "
            "the vocabulary head alone after a process's first update; where old_logprobs come "
            "from a forward, of all tokens, in that one.",
            "below 5e-3", source="verl rollout_probs_diff", chart="Log-prob gap before the update",
            line="generator and training"),
        Metric("rollout_gap_max", "nats", _RL, "lower",
            "The largest such difference of any token, in the same forward.", "below 0.3 in bf16",
            chart="Log-prob gap before the update", line="generator and training, largest"),
        Metric("old_logprobs_sampled", "share", _RL, "",
            "1 if the sampler's log-probs were used as old_logprobs, 0 if they were recomputed."),
    ),
    Metric("reference_updates", "moves", ("pairs", "rl"), "",
        "How often the reference has moved in this step, each time after an optimizer step "
        "(reference.update_every); what is compared afterwards is compared with the new one.",
        "one every reference.update_every optimizer steps", source="arXiv:2404.09656"),
    *grouped("answers",
        Metric("rank_wait", "share", _RL, "lower",
            "Share of the ranks' rollout time spent waiting for the slowest rank.",
            "below 0.2; above, one rank is slow or there are few answers"),
        Metric("prompt_tokens", "tokens", _RL, "", "Mean length of the step's prompts."),
        Metric("response_tokens", "tokens", _RL, "",
            "Mean length of the step's answers, EOS included.",
            "steady; well below sampling.max_new_tokens", title="Answer length",
            chart="Answer length", line="mean", column="tok"),
        Metric("response_tokens_max", "tokens", _RL, "",
            "Longest answer of the step.", title="Longest answer", chart="Answer length",
            line="longest"),
        Metric("eos_rate", "share", _RL, "higher",
            "Finished answers, those that end with a stop token or a text of "
            "sampling.stop_strings; the others were cut off at the length limit.",
            "above 0.9, and not falling", title="Finished answers (EOS rate)",
            chart="Finished answers (EOS rate)", column="eos"),
    ),
    *grouped("update",
        Metric("policy_loss", "normalized advantage", _RL, "",
            "Surrogate loss as the update takes it, mean over the step's updates: per response "
            "token, or as grpo.normalization says (its size is another with each).",
            "small and negative; its size means little", source="arXiv:1707.06347 eq. 7",
            chart="Policy loss"),
        Metric("preference_loss", "nats", _RL, "lower",
            "Loss on the better and the worse answer to a prompt, mean per pair and over the "
            "step's updates (online DPO).", "starts near 0.693 (sigmoid) and falls slowly",
            chart="Preference loss"),
        Metric("preference_accuracy", "share", _RL, "higher",
            "Pairs of the policy's own answers that its implicit reward puts in the order of their "
            "scores; a tie counts half (online DPO).", "0.5 at first, then above",
            chart="Preference accuracy"),
        Metric("preference_margin", "reward units", _RL, "higher",
            "Implicit reward of the better answer minus that of the worse, mean per pair and over "
            "the step's updates (online DPO).", "above 0", chart="Preference margin"),
        Metric("preference_pairs", "pairs", _RL, "",
            "Pairs of the step's answers (online DPO).", "all prompts less the tied ones"),
        Metric("tied_prompts", "share", _RL, "lower",
            "Prompts whose answers all have one score, or of which fewer than two have any; they "
            "teach nothing and are skipped (online DPO).", "below 0.5", chart="Tied prompts"),
        Metric("score_gap", "normalized reward", _RL, "",
            "Mean difference between the scores of the better and the worse answer of a pair "
            "(online DPO).", "above 0"),
        Metric("value_loss", "reward units squared", _RL, "lower",
            "Half the (clipped) squared error of the critic, mean per response token of an update, "
            "then over the step's updates, of which a short last one counts as much.",
            "falls, then follows the policy", chart="Value loss"),
        Metric("entropy", "nats per token", _RL, "",
            "Entropy of the policy's next-token distribution, mean over response tokens.",
            "falls slowly; stays above 10 % of its start", chart="Entropy", column="entropy"),
        Metric("clip_fraction", "share", _RL, "",
            "Response tokens, of all answers of an update, whose gradient the bounds of the ratio "
            "cut: ppo.clip_ratio, or grpo.clip_low and grpo.clip_high. Mean over the step's "
            "updates.", "0.01 to 0.2",
            chart="Clipped tokens", line="policy", column="clip"),
        Metric("clip_fraction_low", "share", _RL, "",
            "Response tokens whose gradient the lower bound of the ratio cut, where the advantage "
            "is negative.", "0 to 0.1", chart="Clipped tokens", line="below"),
        Metric("clip_fraction_high", "share", _RL, "",
            "Response tokens whose gradient the upper bound of the ratio cut, where the advantage "
            "is positive (CISPO: whose weight its cap lowered; also those past "
            "grpo.dual_clip).", "0 to 0.1", chart="Clipped tokens", line="above"),
        Metric("answers_learned", "share", _RL, "",
            "Answers of the updates that the actor's forward and backward read. Those whose "
            "advantages are 0 are left out without a critic and KL or entropy in the loss. 0 where "
            "no answer is in the loss (grpo.overlong_filter).",
            "1 - groups_without_signal where those are left out, else 1"),
        Metric("value_clip_fraction", "share", _RL, "",
            "Response tokens whose gradient ppo.value_clip cut: the value changed by more than it, "
            "and the clipped error is the larger.", "below 0.3",
            chart="Clipped tokens", line="value"),
        Metric("ratio_mean", "ratio", _RL, "", "Mean policy ratio per response token of the "
            "answers that the updates read, over updates.", "0.98 to 1.02"),
        Metric("ratio_max", "ratio", _RL, "", "Largest policy ratio of any response token "
            "that the updates read.", "below 10"),
        Metric("explained_variance", "share", _RL, "higher",
            "1 - Var(returns - values) / Var(returns), before the updates: 1 is a perfect critic, "
            "0 one that predicts only the mean.", "rises from about 0 to between 0.5 and 0.9",
            chart="Explained variance", line="critic", column="ev"),
        Metric("advantage_mean", "reward units", _RL, "",
            "Mean advantage over response tokens, before whitening; after grpo.advantage_scale "
            "group-std or batch-std, which make it a number of standard deviations.",
            "near 0 once the critic is accurate"),
        Metric("advantage_std", "reward units", _RL, "",
            "Standard deviation of the advantages over response tokens, before whitening.",
            "above 0"),
        Metric("values_mean", "reward units", _RL, "", "Mean value over response tokens."),
        Metric("returns_mean", "reward units", _RL, "",
            "Mean return over response tokens.", "near values_mean"),
        Metric("actor_grad_norm", "norm", _RL, "",
            "Global L2 norm of the actor's gradient before clipping, mean over updates.", "steady",
            chart="Gradient norm", line="actor"),
        Metric("critic_grad_norm", "norm", _RL, "",
            "Global L2 norm of the critic's gradient before clipping, mean over updates.", "steady",
            chart="Gradient norm", line="critic"),
        Metric("actor_learning_rate", "ratio", _RL, "",
            "Learning rate of the actor, mean over the step's updates.", chart="Learning rate",
            line="actor"),
        Metric("critic_learning_rate", "ratio", _RL, "",
            "Learning rate of the critic, mean over the step's updates.", chart="Learning rate",
            line="critic"),
        Metric("epochs_done", "passes", _RL, "",
            "Passes over the rollout; a fraction if ppo.early_stop_kl stopped them.", "ppo.epochs"),
        Metric("updates", "updates", _RL, "", "Optimizer steps of the actor in this step."),
        Metric("ptx_loss", "nats per token", _RL, "lower",
            "Language-model loss on the mixture data, before its weight; with grpo.ptx_target "
            "reference the divergence from the reference on them.",
            "level; a rise means forgetting", source="arXiv:2203.02155",
            chart="Loss on mixture data"),
    ),
    Metric("heldout_reward", "normalized reward", _RL, "higher",
        "`reward_before_penalty` of the policy's answers to held-out prompts, "
        "sampling.samples_per_prompt to each (read it with `heldout_eos_rate`). The comparison at "
        "the end of a run takes one to each.", "rises with `reward_before_penalty`",
        chart="Reward before penalty and clipping", column="reward", card=True),
    Metric("heldout_reward_ema", "normalized reward", _RL, "higher",
        "`heldout_reward` of the averaged policy (ppo.ema).", "close to heldout_reward",
        title="Held-out reward, EMA", chart="Reward before penalty and clipping",
        line="held-out, EMA", column="ema"),
    Metric("heldout_reward_function_score", "function units", _RL, "higher",
        "`reward_function_score` of the answers to held-out prompts.", chart="Reward function"),
    Metric("heldout_unscored", "share", _RL, "",
        "Answers to held-out prompts that no reward scored, where there are some. `heldout_reward` "
        "is of the others (scoring.on_none zero: they count as 0 in it), which may be other "
        "answers at the next evaluation, or of another model.",
        "absent: every answer has a score", title="Held-out answers without a score",
        chart="Answers without a score", column="unscored"),
    Metric("heldout_eos_rate", "share", _RL, "higher",
        "`eos_rate` of the answers to held-out prompts.", "not falling",
        title="Held-out finished answers (EOS rate)", chart="Finished answers (EOS rate)",
        column="eos", card=True),
    Metric("heldout_kl", "nats per answer", _RL, "",
        "`kl` of the answers to held-out prompts.", title="Held-out KL to the reference",
        chart="KL to the reference", column="kl", card=True),
    Metric("heldout_divergence", "nats per token", _RL, "lower",
        "The divergence over the vocabulary that grpo.kl names, on the answers to held-out "
        "prompts.", chart="KL in the loss", column="divergence", card=True),
    Metric("heldout_response_tokens", "tokens", _RL, "",
        "`response_tokens` of those.", title="Held-out answer length", chart="Answer length"),
    Metric("heldout_ptx_perplexity", "ratio", _RL, "lower",
        "Perplexity of the policy on held-out mixture text; measures forgetting.", "level",
        chart="Perplexity of mixture data", column="ptx ppl"),
    Metric("heldout_best_step", "step", FAMILIES, "",
        "The step of the best evaluation so far, whose models a stage with `keep_best` leaves.",
        "rises with the steps; where it stays, later steps made the model worse",
        title="Best evaluation's step", column="best at"),
    Metric("skipped", "updates", FAMILIES, "lower",
        "Updates skipped so far because a loss, gradient or reward was not finite or far out of "
        "range; their rows are in the run's folder bad-steps.", "0", title="Skipped updates"),
    Metric("loss_scale", "factor", FAMILIES, "",
        "Factor that losses are multiplied by in fp16; it doubles after 1,000 good steps and "
        "halves on overflow.", "rarely changes"),
    Metric("overflows", "steps", FAMILIES, "",
        "Optimizer steps skipped so far as a gradient overflowed in fp16.", "a few, then rare"),
    Metric("rank_idle", "share", FAMILIES, "lower",
        "Share of the forward and backward passes of a step's updates that do no work, because "
        "their rank had fewer micro-batches than another or no rows. 0 on one rank.",
        "below 0.2; above, raise batch_size or ppo.minibatch_size, or lower micro_batch_tokens"),
    *COSTS,
    OWN,
)
# fmt: on
