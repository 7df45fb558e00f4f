// Votes: how they are sent and undone, and what they say about the reward model.

import { get, post } from "./api.js";
import { button, copyButton, h, nothing, say, show } from "./dom.js";
import { number, percent, short, signed, when } from "./format.js";
import { intervalBar } from "./charts.js";
import { parted, said, thoughtsOf } from "./thoughts.js";

const NAMES = { left: "left", right: "right", best: "best of several", tie: "tie", both_bad: "both bad", rewrite: "rewritten" };

/**
 * Send a vote on a turn's answers. The id is the page's own, so that a vote that is sent again
 * after a broken connection counts once.
 */
export async function sendVote(turn, { verdict, winner, rewrite }) {
  turn.voteId ||= crypto.randomUUID ? crypto.randomUUID() : `vote-${Date.now()}-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  const answers = turn.choices.map((choice) => ({
    model: choice.model, text: said(choice), reward: finite(choice.tandem?.reward), kl: finite(choice.tandem?.kl), tokens: choice.length,
  }));
  const saved = await post("/v1/votes", { id: turn.voteId, messages: turn.messages, answers, verdict, winner, rewrite, seed: turn.seed, blind: turn.blind, who: voter() });
  return { id: saved.id || turn.voteId, told: [told(turn, winner), await agreed()].filter(Boolean).join(" ") };
}

/** The name that is kept with votes; it stays in this browser. */
export function voter(name) {
  try {
    if (name !== undefined) localStorage.setItem("tandem-voter", name);
    return localStorage.getItem("tandem-voter") || "";
  } catch { return ""; }  // a browser that keeps nothing
}

/** How often the reward model agrees, over all votes so far. */
async function agreed() {
  try {
    const { agreement } = await get("/v1/votes?limit=0");
    return agreement?.compared ? `It agrees with ${agreement.agree} of ${agreement.compared} votes (${percent(agreement.rate)}).` : "";
  } catch { return ""; }
}

function finite(value) {
  const x = number(value);
  return Number.isFinite(x) ? x : undefined;
}

/** Whether the reward model would have chosen the same. */
function told(turn, winner) {
  if (winner === undefined) return "";
  const rewards = turn.choices.map((choice) => number(choice.tandem?.reward));
  if (!rewards.every(Number.isFinite)) return "";
  return rewards[winner] === Math.max(...rewards) ? "The reward model agrees." : "The reward model prefers another one.";
}

export async function undoVote(id) {
  await post(`/v1/votes/${encodeURIComponent(id)}`, undefined, "DELETE");
}

export async function votesView(holder, query, { left }) {
  const body = h("div", {});
  show(holder, h("h1", {}, "Votes"), body);
  async function draw() {
    let found;
    try { found = await get("/v1/votes"); } catch (error) {
      if (!left.gone) show(body, nothing(`There are no votes to show: ${error.message}`));
      return;
    }
    if (left.gone) return;
    const votes = found.data || [];
    const agreement = found.agreement || {};
    const compared = agreement.compared ?? 0;
    const commands = Object.entries(found.commands || {});
    show(body,
      h("div", { class: "cards" }, card("votes", found.votes ?? votes.length), card("name a better answer", found.rows ?? votes.filter((vote) => ["left", "right", "best", "rewrite"].includes(vote.verdict)).length),
        card("reward model agrees", compared ? percent(agreement.rate) : "–")),
      compared ? h("div", { class: "panel winrate" }, h("p", {}, `The reward model scores the better answer highest in ${short(agreement.agree, 4)} of ${compared} votes (${percent(agreement.low)} to ${percent(agreement.high)}, Wilson 95 %).`), intervalBar(agreement)) : "",
      commands.length ? [h("h2", {}, "Train on the votes"), commands.map(([stage, command]) => h("div", { class: "commandline" }, h("code", {}, command), copyButton(command, `Copy the ${stage} command`)))] : "",
      h("h2", {}, "All votes"), votes.length ? [...votes].reverse().slice(0, 200).map((vote) => entry(vote)) : nothing("No votes yet. Compare two models in ", h("a", { href: "#/chat" }, "Chat"), " and choose the better answer."));
  }
  function card(label, value) { return h("div", { class: "card" }, h("span", { class: "value" }, value), h("span", { class: "label" }, label)); }
  function entry(vote) {
    const messages = vote.messages || vote.prompt || [];
    const asked = Array.isArray(messages) ? messages.at(-1)?.content || "" : String(messages);
    return h("article", { class: "panel" }, h("div", { class: "head" }, h("p", { class: "prompt", dir: "auto" }, asked), button("Undo", async () => {
      try { await undoVote(vote.id); say("The vote is undone."); await draw(); } catch (error) { say(error.message); }
    }, { class: "quiet", "aria-label": `Undo the vote on: ${asked.slice(0, 60)}` })),
    h("div", { class: "answers" }, (vote.answers || []).map((answer, i) => h("div", { class: "answer" }, h("div", { class: "head" }, h("b", {}, answer.model || `answer ${i + 1}`), i === vote.winner ? h("span", { class: "badge" }, "better") : "", h("span", { class: "score" }, `reward ${Number.isFinite(number(answer.reward)) ? signed(answer.reward) : "–"}`)), spokenText(answer.text ?? answer.content ?? "")))),
    vote.rewrite ? spokenText(vote.rewrite, h("b", {}, "rewritten: ")) : "",
    h("p", { class: "soft small" }, [NAMES[vote.verdict] || vote.verdict, vote.who && `by ${vote.who}`, when(number(vote.created))].filter(Boolean).join(" · ")));
  }
  function spokenText(whole, ...before) {
    const { thoughts, text } = parted(whole), folded = { text: text || " " };
    return [thoughts ? thoughtsOf(folded, h("p", { class: "text", dir: "auto" }, thoughts)) : "", h("p", { class: "text", dir: "auto" }, before, text)];
  }
  await draw();
  const timer = window.setInterval(() => { if (!document.hidden && !body.contains(document.activeElement)) draw(); }, 5000);
  left.stop = () => window.clearInterval(timer);
}
