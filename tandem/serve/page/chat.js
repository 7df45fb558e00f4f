// Chat with one model, or compare up to four side by side, and vote on their answers.

import { get, streamed } from "./api.js";
import { add, button, choose, field, h, newId, nothing, say, show } from "./dom.js";
import { counted, number, short, signed } from "./format.js";
import { foldThoughts, said, thoughtsOf } from "./thoughts.js";
import { measuresOf, tokenText } from "./tokens.js";
import { sendVote, undoVote, voter } from "./votes.js";

const LETTERS = ["A", "B", "C", "D"];
const KNOBS = [
  ["temperature", "Temperature", 0, 5, 0.05], ["top_p", "Top p", 0, 1, 0.01], ["top_k", "Top k", 0, 100000, 1],
  ["min_p", "Min p", 0, 1, 0.01], ["max_tokens", "Most tokens", 1, 100000, 1], ["repetition_penalty", "Repetition penalty", 0.01, 10, 0.01], ["presence_penalty", "Presence penalty", -2, 2, 0.1], ["frequency_penalty", "Frequency penalty", -2, 2, 0.1], ["seed", "Seed", 0, 2 ** 31, 1],
];
const OPENAI = { temperature: 1, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0 };
// What a conversation is outlives a look at another view.
const state = { models: [], chosen: [], count: 2, blind: false, measure: "", system: "", knobs: {}, turns: [], draft: "", running: null };

export async function chatView(holder, query, { left }) {
  let listed;
  try {
    listed = await get("/v1/models");
  } catch (error) {
    show(holder, h("h1", {}, "Chat"), nothing(`No model can be asked here: ${error.message}`));
    return;
  }
  const policies = listed.data.filter((model) => (model.tandem?.kind ?? "policy") === "policy");
  state.models = policies.map((model) => model.id);
  if (!state.models.length) { show(holder, h("h1", {}, "Chat"), nothing("This server has no model to talk to.")); return; }
  const references = Object.fromEntries(policies.map((model) => [model.id, model.tandem?.reference]));
  const defaults = { ...OPENAI, ...(policies[0].tandem?.defaults || {}) };
  state.count = Math.min(state.count, 4);
  if (!state.chosen.length) {
    const preferred = policies.find((model) => model.tandem?.preferred)?.id;
    const latest = [...state.models].reverse().sort((a, b) => (b === preferred) - (a === preferred));
    state.chosen = LETTERS.map((_, i) => latest[i % latest.length]);
    if (state.models.length === 1) state.count = 1;
  }
  state.chosen = state.chosen.map((id) => (state.models.includes(id) ? id : state.models[0]));

  const log = h("div", { class: "conversation", role: "log", "aria-label": "Conversation", "aria-live": "off" });
  const setup = h("div", { class: "toolbar" });
  const input = h("textarea", { rows: 2, value: state.draft, placeholder: "Say something to the models", on: {
    input: () => { state.draft = input.value; },
    keydown: (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } },
  } });
  const sendButton = h("button", { class: "primary" }, "Send");
  const stopButton = button("Stop", () => state.running?.abort());
  const form = h("form", { class: "composer", on: { submit: (event) => { event.preventDefault(); send(); } } },
    h("div", { class: "grow" }, field("Your message", input, "Enter sends, Shift+Enter begins a line.")), h("div", { class: "buttons" }, sendButton, stopButton));

  function drawSetup() {
    const blind = h("input", { type: "checkbox", id: newId("blind"), checked: state.blind, on: { change: () => { state.blind = blind.checked; drawSetup(); } } });
    show(setup, field("Answers", choose([["1", "one model"], ["2", "two side by side"], ["3", "three"], ["4", "four"]], state.count, (value) => { state.count = Number(value); drawSetup(); })),
      Array.from({ length: state.count }, (_, i) => field(state.count > 1 ? `Model ${LETTERS[i]}` : "Model", choose(state.models, state.chosen[i], (value) => { state.chosen[i] = value; }))),
      state.count > 1 ? h("div", { class: "check field" }, blind, h("label", { for: blind.id }, "Blind: shuffle, and hide names until the vote")) : "",
      field("Color tokens by", choose([["", "nothing"], ["kl", "KL"], ["values", "value"], ["logprobs", "log-prob"]], state.measure, (value) => { state.measure = value; drawAll(); })));
  }

  function knobs() {
    return h("details", { class: "panel knobs" }, h("summary", {}, "Sampling, system prompt, your name"),
      field("System prompt", h("textarea", { rows: 2, value: state.system, on: { input: (event) => { state.system = event.target.value; } } })),
      field("Your name", h("input", { type: "text", maxlength: 100, value: voter(), on: { input: (event) => voter(event.target.value.trim()) } }), "Kept with your votes."),
      h("div", { class: "toolbar" }, KNOBS.map(([name, label, min, max, step]) => field(label, h("input", {
        type: "number", min, max, step, value: state.knobs[name] ?? "", placeholder: String(defaults[name] ?? (name === "seed" ? "random" : "server's")),
        on: { input: (event) => { if (event.target.value === "") delete state.knobs[name]; else state.knobs[name] = Number(event.target.value); } },
      }))), h("div", { class: "field" }, button("Defaults", () => { state.knobs = {}; knobsHolder.replaceChildren(knobs()); knobsHolder.firstChild.open = true; }, { class: "quiet" }))));
  }
  const knobsHolder = h("div", {}, knobs());

  const contextBefore = (turns) => [...(state.system ? [{ role: "system", content: state.system }] : []), ...turns.flatMap((turn) =>
    turn.role === "user" ? [{ role: "user", content: turn.content }] : [spoken(turn)])];

  function busy(on) {
    sendButton.disabled = on;
    stopButton.hidden = !on;
  }

  async function send() {
    const content = state.draft.trim();
    if (!content || state.running) return;
    state.turns.push({ role: "user", content });
    state.draft = ""; input.value = "";
    await answer();
  }

  async function answer() {
    const messages = contextBefore(state.turns);
    let models = state.chosen.slice(0, state.count);
    const blind = state.blind && models.length > 1;
    if (blind) models = shuffled(models);
    const turn = {
      role: "assistant", picked: 0, blind, revealed: !blind, messages, vote: null, rewritten: undefined,
      choices: models.map((model) => ({ model, thoughts: "", text: "", thoughtTokens: 0, tokens: [], logprobs: [], done: false, error: "" })),
    };
    state.turns.push(turn);
    const abort = new AbortController();
    state.running = abort;
    busy(true);
    drawAll();
    const seed = state.knobs.seed ?? crypto.getRandomValues(new Uint32Array(1))[0];
    turn.seed = seed;
    await Promise.all(turn.choices.map((choice) => one(choice, messages, seed, abort.signal)));
    state.running = null;
    busy(false);
    drawAll();
    if (left.gone) return;
    say(turn.choices.length > 1 ? "The answers are complete." : "The answer is complete.");
    if (document.activeElement === document.body) input.focus();
  }

  async function one(choice, messages, seed, signal) {
    const started = performance.now();
    const sampling = Object.fromEntries(Object.entries(state.knobs).filter(([name]) => name !== "seed"));
    try {
      const body = { ...sampling, seed, model: choice.model, messages, stream: true, stream_options: { include_usage: true }, logprobs: true, tandem: { reward: true, kl: true, token_kl: true, values: true } };
      for await (const event of streamed("/v1/chat/completions", body, signal)) {
        if (event.usage) choice.length = event.usage.completion_tokens;
        const part = event.choices?.[0];
        if (!part) continue;
        const words = part.delta?.content || "", isFirst = words && !choice.text;
        choice.thoughts += part.delta?.reasoning_content || "";
        choice.text += words;
        for (const token of part.logprobs?.content || []) { choice.tokens.push(token.token); choice.logprobs.push(token.logprob); }
        if (choice.thoughts && (isFirst || !choice.text)) choice.thoughtTokens = choice.tokens.length - tokensOf(words, choice.tokens);
        if (part.tandem) Object.assign(choice, { tandem: part.tandem });
        if (part.finish_reason) choice.finish = part.finish_reason;
        choice.live?.();
      }
    } catch (error) {
      if (error.name === "AbortError") choice.finish = "stopped";
      else choice.error = error.message;
    }
    choice.seconds = (performance.now() - started) / 1000;
    choice.length ??= choice.tokens.length;
    choice.done = true;
    choice.finished?.();
  }

  function drawAll() {
    if (left.gone) return;
    if (!state.turns.length) {
      show(log, h("div", { class: "hello" }, h("p", {}, "Ask one model, or several side by side."), h("p", { class: "soft" }, "Under each answer: its reward, its KL to the model it was trained from, and its length. A vote becomes a row of preference data.")));
      return;
    }
    show(log, state.turns.map((turn, index) => (turn.role === "user" ? userTurn(turn, index) : answerTurn(turn, index))));
    log.lastElementChild.scrollIntoView({ block: "nearest" });
  }

  function userTurn(turn, index) {
    const element = h("div", { class: "bubble user" }, h("span", { class: "role" }, "you"), h("p", { dir: "auto" }, turn.content));
    const edit = button("Edit", () => {
      const box = h("textarea", { rows: 3, value: turn.content, "aria-label": "Edited message" });
      show(element, box, h("div", { class: "buttons" }, button("Send again", () => {
        if (state.running || !box.value.trim()) return;
        state.turns = [...state.turns.slice(0, index), { role: "user", content: box.value.trim() }];
        answer();
      }, { class: "primary" }), button("Cancel", drawAll)));
      box.focus();
    }, { class: "quiet", disabled: Boolean(state.running), "aria-label": "Edit this message" });
    return add(element, edit);
  }

  function answerTurn(turn, index) {
    const isLast = index === state.turns.length - 1;
    const several = turn.choices.length > 1;
    const done = turn.choices.every((choice) => choice.done);
    const best = Math.max(...turn.choices.map((choice) => number(choice.tandem?.reward)).filter(Number.isFinite));
    const columns = h("div", { class: `columns of${turn.choices.length}` }, turn.choices.map((choice, place) => answerCard(turn, choice, place, several, best)));
    const parts = [columns];
    if (turn.rewritten !== undefined) parts.push(h("div", { class: "answer picked" }, h("div", { class: "head" }, h("b", {}, "rewritten"), h("span", { class: "badge" }, "continues the conversation")), h("p", { class: "text", dir: "auto" }, turn.rewritten)));
    if (done && turn.choices.some(said)) parts.push(voteBar(turn));
    if (done && isLast) {
      parts.push(h("div", { class: "buttons" }, button("Retry", () => { state.turns.pop(); answer(); }, { class: "quiet" }),
        turn.blind && !turn.revealed ? button("Reveal the models", () => { turn.revealed = true; drawAll(); }, { class: "quiet" }) : "",
        button("New conversation", () => { state.turns = []; drawAll(); input.focus(); }, { class: "quiet" })));
    }
    return h("div", { class: "turnblock" }, parts);
  }

  function answerCard(turn, choice, place, several, best) {
    const text = h("div", { class: "text", dir: "auto" });
    const thought = thoughtsOf(choice);
    const facts = h("p", { class: "facts small" });
    const name = several ? `${LETTERS[place]}${turn.revealed ? ` · ${choice.model}` : ""}` : choice.model;
    const card = h("article", { class: `answer${several && turn.rewritten === undefined && turn.picked === place ? " picked" : ""}`, "aria-label": `Answer ${name}` },
      h("div", { class: "head" }, h("b", {}, name), several && turn.picked === place && turn.rewritten === undefined ? h("span", { class: "badge" }, "continues the conversation") : ""), thought, text, facts);
    const drawn = () => {
      const isColored = choice.done && choice.tokens.length && state.measure && !choice.error;
      thought.hidden = !choice.thoughts || isColored;
      thought.lastChild.textContent = choice.thoughts;
      foldThoughts(thought, choice);

      const scores = choice.tandem || {};
      const columns = { kl: scores.token_kl || [], values: scores.values || [], logprobs: choice.logprobs };
      const known = measuresOf(columns).map(([measure]) => measure);
      if (choice.error) show(text, h("p", { class: "error" }, choice.error));
      else if (isColored) show(text, known.includes(state.measure) ? "" : h("p", { class: "soft small" }, `No ${state.measure} here: ${scores.why?.[state.measure] || "the server gave none"}.`), tokenText(choice.tokens, columns, known.includes(state.measure) ? state.measure : "", `Answer ${name}`, choice.thoughtTokens, (spans) => thoughtsOf(choice, spans)));
      else show(text, choice.text || (choice.done ? (choice.thoughts ? h("span", { class: "soft" }, "(no words: the thoughts have not ended)") : "(no text)") : h("span", { class: "soft" }, "…")));
      if (!choice.done) { facts.textContent = choice.tokens.length ? `${counted(choice.tokens.length, "token")} so far` : ""; return; }
      const reward = number(scores.reward);
      show(facts, h("span", { class: `score${several && reward === best ? " best" : ""}` }, "reward ", Number.isFinite(reward) ? signed(reward) : "–"), " ",
        h("span", { class: "score" }, turn.revealed && references[choice.model] ? `KL to ${references[choice.model]} ` : "KL ", Number.isFinite(number(scores.kl)) ? `${short(scores.kl)} nats` : "–"), " ",
        h("span", { class: "score" }, `${counted(choice.length, "token")}${choice.finish === "length" ? ", cut at the limit" : choice.finish === "stopped" ? ", stopped" : ""}`), " ",
        h("span", { class: "soft" }, `${choice.seconds.toFixed(1)} s`));
      if (scores.why && turn.revealed) facts.title = Object.entries(scores.why).map(([what, why]) => `${what}: ${why}`).join("; ");
    };
    let asked = false;
    choice.live = () => { if (asked) return; asked = true; requestAnimationFrame(() => { asked = false; if (!choice.done) drawn(); }); };
    choice.finished = drawn;
    drawn();
    return card;
  }

  function voteBar(turn) {
    const bar = h("div", { class: "votebar", role: "group", "aria-label": "Vote on these answers" });
    const status = h("span", { class: "soft small", role: "status" });
    const cast = async (verdict, winner, rewrite) => {
      const buttons = [...bar.querySelectorAll("button")];
      for (const one of buttons) one.disabled = true;
      try {
        const { thoughts } = turn.choices[turn.picked];
        const saved = await sendVote(turn, { verdict, winner, rewrite: rewrite && said({ thoughts, text: rewrite }) });
        turn.vote = { id: saved.id, verdict, told: saved.told };
        turn.revealed = true;
        if (winner !== undefined) turn.picked = winner;
        if (rewrite !== undefined) turn.rewritten = rewrite;
        drawAll();
        say(`Vote saved. ${saved.told}`);
      } catch (error) {
        for (const one of buttons) one.disabled = false;
        status.textContent = `Not saved: ${error.message}`;
      }
    };
    if (turn.vote) {
      return show(bar, h("span", {}, `Voted: ${turn.vote.verdict}. `), h("span", { class: "soft small" }, turn.vote.told), " ", button("Undo", async () => {
        try {
          await undoVote(turn.vote.id);
          turn.vote = null; turn.voteId = undefined; turn.rewritten = undefined;
          drawAll(); say("The vote is undone.");
        } catch (error) { status.textContent = error.message; }
      }, { class: "quiet" }), status);
    }
    const rewrite = () => {
      const box = h("textarea", { rows: 4, value: turn.choices[turn.picked].text, "aria-label": "The answer as it should be" });
      const dialog = h("div", { class: "rewrite" }, field("The answer as it should be", box, turn.choices[turn.picked].thoughts ? "Its thoughts are kept before it." : ""), h("div", { class: "buttons" }, button("Save", () => { if (box.value.trim()) cast("rewrite", undefined, box.value); }, { class: "primary" }), button("Cancel", drawAll)));
      bar.append(dialog);
      box.focus();
    };
    if (turn.choices.length === 1) return show(bar, button("Rewrite…", rewrite), status);
    const names = turn.choices.length === 2 ? ["A: left is better", "B: right is better"] : turn.choices.map((_, i) => `${LETTERS[i]} is best`);
    return show(bar, names.map((label, i) => button(label, () => cast(turn.choices.length === 2 ? ["left", "right"][i] : "best", i))),
      button("Tie", () => cast("tie")), button(turn.choices.length === 2 ? "Both bad" : "All bad", () => cast("both_bad")),
      button("Rewrite…", rewrite), status);
  }

  show(holder, h("h1", {}, "Chat and compare"), setup, knobsHolder, log, form);
  drawSetup();
  busy(Boolean(state.running));
  drawAll();
}

/** An answered turn as the next request has it. */
function spoken(turn) {
  const { thoughts, text } = turn.choices[turn.picked];
  const message = { role: "assistant", content: turn.rewritten ?? text };
  return thoughts ? { ...message, reasoning_content: thoughts } : message;
}

/** How many of the last tokens a text is in. */
function tokensOf(text, tokens) {
  let count = 0;
  for (let length = 0; length < text.length && count < tokens.length; count += 1) length += tokens.at(-1 - count).length;
  return count;
}

/** In a random order, every order as likely. */
function shuffled(list) {
  const found = [...list];
  for (let i = found.length - 1; i > 0; i -= 1) {
    const limit = 2 ** 32 - (2 ** 32 % (i + 1));
    let draw;
    do { [draw] = crypto.getRandomValues(new Uint32Array(1)); } while (draw >= limit);
    const j = draw % (i + 1);
    [found[i], found[j]] = [found[j], found[i]];
  }
  return found;
}
