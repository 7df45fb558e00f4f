// Rollouts: recorded answers in a list of any length, one prompt over training, two steps or runs.

import { runs } from "./api.js";
import { intervalBar, lineChart } from "./charts.js";
import { add, button, choose, field, h, newId, nothing, say, show } from "./dom.js";
import { counted, number, percent, short, signed } from "./format.js";
import { pickRun, pickStage } from "./runs.js";
import { measuresOf, tokenText } from "./tokens.js";

const PAGE = 100;
const SORTS = [["order", "as recorded"], ["-reward", "highest reward"], ["reward", "lowest reward"], ["-length", "longest"], ["length", "shortest"], ["-kl", "highest KL"], ["kl", "lowest KL"], ["-step", "latest step"]];
const TABS = { answers: "Answers", prompt: "One prompt over training", compare: "Two steps or runs" };

export async function rolloutsView(holder, query, { remember, left }) {
  const list = (await runs.list()).runs.filter((run) => run.stages.some((stage) => stage.family === "rl"));
  if (!list.length) {
    show(holder, h("h1", {}, "Rollouts"), nothing("No run here has a stage that learns from its own answers (PPO, GRPO, online DPO) yet."));
    return;
  }
  const state = { tab: query.get("tab") in TABS ? query.get("tab") : "answers", run: pickRun(list, query.get("run")).id, stage: query.get("stage"), step: query.get("step") || "", sort: query.get("sort") || "order", filter: query.get("filter") || "", prompt: query.get("prompt") || "", other: query.get("other") || "", from: query.get("from") || "", to: query.get("to") || "" };
  const run = () => list.find((one) => one.id === state.run);
  const settle = () => { state.stage = pickStage(run(), state.stage, "rl").name; };
  settle();
  const keep = () => remember({ tab: state.tab, run: state.run, stage: state.stage, step: state.step, sort: state.sort === "order" ? "" : state.sort, filter: state.filter, prompt: state.prompt, other: state.other, from: state.from, to: state.to });
  const tools = h("div", { class: "toolbar" }), body = h("div", {}), tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Rollout views" });
  body.id = newId("panel");

  function drawTabs() {
    show(tabs, Object.entries(TABS).map(([name, label]) => button(label, () => { state.tab = name; keep(); draw(); tabs.querySelector("[aria-selected=true]").focus(); }, {
      role: "tab", "aria-selected": String(state.tab === name), "aria-controls": body.id, tabindex: state.tab === name ? 0 : -1, id: `tab-${name}`,
    })));
  }
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const names = Object.keys(TABS);
    tabs.querySelector(`#tab-${names[(names.indexOf(state.tab) + step + names.length) % names.length]}`).click();
  });

  const runChoice = () => field("Run", choose(list.map((one) => one.id), state.run, (value) => { state.run = value; settle(); state.step = ""; state.prompt = ""; state.from = ""; state.to = ""; keep(); draw(); }));
  const stageChoice = () => field("Stage", choose(run().stages.filter((stage) => stage.family === "rl").map((stage) => [stage.name, stage.title]), state.stage, (value) => { state.stage = value; state.step = ""; keep(); draw(); }));

  async function draw() {
    drawTabs();
    body.setAttribute("role", "tabpanel");
    body.setAttribute("aria-labelledby", `tab-${state.tab}`);
    const made = { answers: drawAnswers, prompt: drawPrompt, compare: drawCompare }[state.tab];
    try { await made(); } catch (error) { if (!left.gone) show(body, nothing(error.message)); }
  }

  async function drawAnswers() {
    const of = (more) => runs.of(state.run, "rollouts", { stage: state.stage, step: state.step, filter: state.filter, sort: state.sort, ...more });
    const first = await of({ offset: 0, limit: PAGE });
    if (left.gone) return;
    const search = h("input", { type: "search", value: state.filter, placeholder: "text of prompt or answer", on: { input: () => {
      window.clearTimeout(search.timer);
      search.timer = window.setTimeout(async () => { state.filter = search.value; keep(); restart(await of({ offset: 0, limit: PAGE })); }, 200);
    } } });
    show(tools, runChoice(), stageChoice(),
      field("Step", choose([["", "all steps"], ...first.steps.map((step) => [step, `step ${step}`])], state.step, async (value) => { state.step = value; keep(); restart(await of({ offset: 0, limit: PAGE })); })),
      field("Sort by", choose(SORTS, state.sort, async (value) => { state.sort = value; keep(); restart(await of({ offset: 0, limit: PAGE })); })),
      h("div", { class: "grow" }, field("Search", search)));
    if (!first.total) {
      show(body, nothing("No answer of this stage is recorded. Answers are recorded from this version on, unless log.record_answers is 0."));
      return;
    }
    const count = h("p", { class: "soft small", role: "status" }), listHolder = h("div", { class: "listholder" }), detail = h("div", { class: "detail", "aria-live": "off" });
    show(body, h("div", { class: "split" }, h("div", {}, count, listHolder), detail));
    show(detail, nothing("Choose an answer to see it token by token."));
    const virtual = virtualList({ label: "Recorded answers", page: PAGE, fetch: (offset) => of({ offset, limit: PAGE }), row: answerRow, open: (row) => drawDetail(detail, row) });
    listHolder.append(virtual.element);
    function restart(found) {
      count.textContent = found.matched === found.total ? `${found.total.toLocaleString("en")} answers` : `${found.matched.toLocaleString("en")} of ${found.total.toLocaleString("en")} answers`;
      virtual.restart(found);
    }
    restart(first);
  }

  /** A stage without rewards has none. */
  function rewardChip(x) {
    return x.reward === undefined ? "" : h("span", { class: `chip ${number(x.reward) < 0 ? "neg" : "pos"}` }, `reward ${signed(x.reward)}`);
  }

  function answerRow(row) {
    return [h("span", { class: "rowtop" }, h("span", { class: "chip" }, `step ${row.step}`), rewardChip(row),
      row.kl === undefined ? "" : h("span", { class: "chip" }, `KL ${short(row.kl)}`), h("span", { class: "chip" }, `${counted(row.length, "token")}${row.finished ? "" : ", cut"}`)),
    h("span", { class: "rowprompt", dir: "auto" }, row.prompt), h("span", { class: "rowtext", dir: "auto" }, row.text || "(empty)")];
  }

  let measure = "kl";
  async function drawDetail(detail, row) {
    const whole = await runs.of(state.run, "rollout", { stage: state.stage, step: row.step, row: row.row });
    if (left.gone) return;
    const known = measuresOf(whole);
    // The file has log-probs of both models; their difference is the token's KL.
    if (whole.ref_logprobs && whole.logprobs) {
      whole.kl = whole.logprobs.map((x, i) => number(x) - number(whole.ref_logprobs[i]));
      known.unshift(["kl", "KL"]);
    } else delete whole.kl;
    if (!known.some(([name]) => name === measure)) measure = known[0]?.[0] || "";
    const tokens = h("div", {});
    const draw = () => show(tokens, whole.tokens ? tokenText(whole.tokens, whole, measure) : h("p", { class: "text", dir: "auto" }, whole.text));
    show(detail, h("div", { class: "panel" },
      h("h2", {}, `Step ${row.step}, answer ${row.row}`), (whole.prompt || []).map((turn) => h("div", { class: `turn ${turn.role}` }, h("span", { class: "role" }, turn.role), h("p", { dir: "auto" }, turn.content))),
      h("div", { class: "turn assistant" }, h("span", { class: "role" }, "answer"), tokens),
      h("div", { class: "toolbar tight" }, known.length ? field("Color by", choose(known, measure, (value) => { measure = value; draw(); })) : "",
        button("Follow this prompt", () => { state.tab = "prompt"; state.prompt = whole.prompt_id; keep(); draw2(); }, { class: "quiet" })),
      h("dl", { class: "facts" }, [...(whole.reward === undefined ? [] : [["reward", signed(whole.reward, 4)]]), ["KL of the answer", row.kl === undefined ? "–" : `${short(row.kl, 4)} nats`], ["length", `${whole.length} tokens`], ["ended", whole.finished ? "with a stop token" : "cut at the limit"]].map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value))))));
    draw();
    const draw2 = () => { drawTabs(); drawPrompt(); };
  }

  async function drawPrompt() {
    const found = await runs.of(state.run, "prompts", { stage: state.stage });
    if (left.gone) return;
    show(tools, runChoice(), stageChoice());
    if (!state.prompt && found.prompts.length) state.prompt = found.prompts[0].id;
    const known = found.prompts.some((one) => one.id === state.prompt);
    if (!state.prompt) { show(body, nothing("No prompt is followed in this stage: it has no held-out prompts, or was run by an earlier version.")); return; }
    const names = found.prompts.map((one) => [one.id, one.prompt.slice(0, 70) + (one.first === null ? "" : ` (${signed(one.first)} → ${signed(one.last)})`)]);
    if (!known && state.prompt) names.push([state.prompt, "the chosen training prompt"]);
    tools.append(h("div", { class: "grow" }, field("Prompt, with its reward first and last", choose(names, state.prompt, (value) => { state.prompt = value; keep(); drawPrompt(); }))));
    const one = await runs.of(state.run, "prompt", { stage: state.stage, id: state.prompt });
    if (left.gone) return;
    const points = (lines, name) => lines.filter((x) => x[name] !== undefined).map((x) => [x.step, number(x[name])]);
    // Training rewards have penalties and clips, held-out ones do not: no axis for both.
    const chart = (title, name, unit, kinds) => lineChart({ title, unit, series: kinds.map(([kind, color]) => ({
      label: kind === "followed" ? "held-out" : "training", color, marks: true, points: points(one[kind], name),
    })).filter((x) => x.points.length) });
    const both = [["followed", 2], ["trained", 1]];
    const charts = [chart("Held-out reward", "reward", "reward", [both[0]]), chart("Training reward", "reward", "after penalties", [both[1]]), chart("KL", "kl", "nats", both), chart("Length", "length", "tokens", both)].filter(Boolean);
    const answers = [...one.followed.map((x) => ({ ...x, kind: "evaluation" })), ...one.trained.map((x) => ({ ...x, kind: "training" }))].sort((a, b) => a.step - b.step);
    show(body, h("div", { class: "panel" }, (one.prompt || []).map((turn) => h("div", { class: `turn ${turn.role}` }, h("span", { class: "role" }, turn.role), h("p", { dir: "auto" }, turn.content)))),
      h("h2", {}, "Numbers over training"), h("div", { class: "figures" }, charts),
      h("h2", {}, "Answers over training"), h("ol", { class: "timeline" }, answers.map((x, i) => h("li", { class: "panel" },
        h("div", { class: "rowtop" }, h("span", { class: "chip" }, `step ${x.step}`), h("span", { class: "chip" }, x.kind), rewardChip(x), x.kl === undefined ? "" : h("span", { class: "chip" }, `KL ${short(x.kl)}`), h("span", { class: "chip" }, `${counted(x.length, "token")}${x.finished ? "" : ", cut"}`)),
        h("p", { class: "text", dir: "auto" }, difference(i ? answers[i - 1].text : null, x.text))))),
      found.win_rates.length ? [h("h2", {}, `Win rates against step ${found.steps[0]}`), h("p", { class: "soft small" }, "All followed prompts; a tie counts half. The interval is Wilson's at 95 %."), h("div", { class: "panel scroll", tabindex: 0, role: "group", "aria-label": "Win rates by step" }, h("table", {},
        h("thead", {}, h("tr", {}, ["step", "wins, ties, losses", "win rate", "interval"].map((head) => h("th", { scope: "col" }, head)))),
        h("tbody", {}, found.win_rates.map((rate) => h("tr", {}, h("th", { scope: "row" }, rate.step), h("td", {}, `${rate.wins}, ${rate.ties}, ${rate.losses}`), h("td", {}, `${percent(rate.rate)} (${percent(rate.low)} to ${percent(rate.high)})`), h("td", {}, intervalBar(rate)))))))] : "");
  }

  async function drawCompare() {
    const other = list.find((one) => one.id === state.other) || run();
    const theirs = pickStage(other, state.stage, "rl").name;
    const found = await runs.of(state.run, "compare", { stage: state.stage, step: state.from === "" ? "0" : state.from, other: other.id, other_stage: theirs, other_step: state.to });
    if (left.gone) return;
    show(tools, runChoice(), stageChoice(), field("Step", choose(found.steps[0], found.before, (value) => { state.from = value; keep(); draw(); })),
      field("Other run", choose(list.map((one) => one.id), other.id, (value) => { state.other = value; state.to = ""; keep(); draw(); })),
      field("Its step", choose(found.steps[1], found.after, (value) => { state.to = value; keep(); draw(); })));
    if (!found.rows.length) { show(body, nothing("The two have no held-out prompt in common.")); return; }
    const rate = found.win_rate, before = `${state.run} step ${found.before}`, after = `${other.id} step ${found.after}`;
    const rows = [...found.rows].sort((a, b) => Math.abs(number(b.after.reward) - number(b.before.reward)) - Math.abs(number(a.after.reward) - number(a.before.reward)));
    const side = (label, x, best, earlier = null) => h("div", { class: "answer" }, h("div", { class: "head" }, h("b", {}, label), x.reward === undefined ? "" : h("span", { class: `score${best ? " best" : ""}` }, `reward ${signed(x.reward)}${x.answers ? `, mean of ${x.answers}` : ""}`)), h("p", { class: "text", dir: "auto" }, difference(earlier, x.text)), h("p", { class: "soft small" }, `${counted(x.length, "token")}${x.kl === undefined ? "" : `, KL ${short(x.kl)}`}`));
    const compared = rate && rate.wins + rate.ties + rate.losses;
    const result = rate ? [h("p", {}, h("b", {}, after), " scores higher than ", h("b", {}, before), " on ", h("b", {}, percent(rate.rate)), ` of ${counted(compared, "prompt")} (${percent(rate.low)} to ${percent(rate.high)}, Wilson 95 %): ${counted(rate.wins, "win")}, ${counted(rate.ties, "tie")}, ${counted(rate.losses, "loss", "losses")}.`), intervalBar(rate)]
      : [h("p", {}, h("b", {}, after), " beside ", h("b", {}, before), `, on ${counted(found.rows.length, "prompt")}. There is no win rate: no prompt has a reward in both.`)];
    show(body, h("div", { class: "panel winrate" }, result,
      found.only_before || found.only_after ? h("p", { class: "soft small" }, `Not compared: ${found.only_before} prompts of the first alone, ${found.only_after} of the second.`) : ""),
    h("h2", {}, rate ? "Largest changes first" : "Answers"), rows.map((row) => h("article", { class: "panel" }, h("p", { class: "prompt", dir: "auto" }, row.prompt), h("div", { class: "answers" },
      side(before, row.before, number(row.before.reward) > number(row.after.reward)), side(after, row.after, number(row.after.reward) > number(row.before.reward), row.before.text)))));
  }

  show(holder, h("h1", {}, "Rollouts"), tabs, tools, body);
  await draw();
}

/** The words of a text, those that the earlier one lacked marked (longest common subsequence). */
export function difference(before, text) {
  if (before === null || before === undefined) return text || "(empty)";
  const a = before.split(/(?<=\s)/), b = (text || "").split(/(?<=\s)/);
  if (!b.length || a.length * b.length > 250000) return text || "(empty)";
  const table = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) for (let j = b.length - 1; j >= 0; j -= 1) table[i][j] = a[i] === b[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
  const parts = [];
  for (let i = 0, j = 0; j < b.length;) {
    if (i < a.length && a[i] === b[j]) { parts.push(b[j]); i += 1; j += 1; } else if (i < a.length && table[i + 1][j] >= table[i][j + 1]) i += 1;
    else { parts.push(h("ins", {}, b[j])); j += 1; }
  }
  return parts;
}

/** A list of any length of which only the rows in sight exist. One tab stop; arrows, Home, End, Enter. */
function virtualList({ label, page, fetch, row, open }) {
  const HEIGHT = 92, AROUND = 6;
  const inner = h("div", { class: "rows", role: "presentation" });
  const element = h("div", { class: "virtual", tabindex: 0, role: "listbox", "aria-label": label }, inner);
  let total = 0, pages = new Map(), waiting = new Set(), active = 0, generation = 0, selected = -1;
  const shown = new Map();
  const id = newId("list");

  function restart(first) {
    generation += 1;
    total = first.matched; pages = new Map([[0, first.rows]]); waiting = new Set(); active = 0; selected = -1;
    inner.style.height = `${total * HEIGHT}px`;
    for (const one of shown.values()) one.remove();
    shown.clear();
    element.scrollTop = 0;
    draw();
  }
  async function need(number) {
    if (pages.has(number) || waiting.has(number)) return;
    waiting.add(number);
    const asked = generation;
    try {
      const found = await fetch(number * page);
      if (asked !== generation) return;
      pages.set(number, found.rows);
      for (const [index, one] of shown) if (Math.floor(index / page) === number) { one.remove(); shown.delete(index); }
      draw();
    } catch (error) { say(error.message); } finally { waiting.delete(number); }
  }
  function make(index) {
    const data = pages.get(Math.floor(index / page))?.[index % page];
    const one = h("div", { class: `row${index === active ? " active" : ""}`, role: "option", id: `${id}-${index}`, "aria-setsize": total, "aria-posinset": index + 1, "aria-selected": String(index === selected), on: { click: () => { go(index); choose(); } } });
    one.style.top = `${index * HEIGHT}px`;
    if (data) add(one, row(data)); else { add(one, h("span", { class: "soft" }, "…")); need(Math.floor(index / page)); }
    return one;
  }
  function draw() {
    if (!total) { element.removeAttribute("aria-activedescendant"); return; }
    const from = Math.max(0, Math.floor(element.scrollTop / HEIGHT) - AROUND);
    const to = Math.min(total, Math.ceil((element.scrollTop + element.clientHeight) / HEIGHT) + AROUND);
    for (const [index, one] of shown) if ((index < from || index >= to) && index !== active) { one.remove(); shown.delete(index); }
    for (let index = from; index < to; index += 1) if (!shown.has(index)) { const one = make(index); shown.set(index, one); inner.append(one); }
    if (shown.has(active)) element.setAttribute("aria-activedescendant", `${id}-${active}`);
  }
  function go(index) {
    shown.get(active)?.classList.remove("active");
    active = Math.min(total - 1, Math.max(0, index));
    const top = active * HEIGHT;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top + HEIGHT > element.scrollTop + element.clientHeight) element.scrollTop = top + HEIGHT - element.clientHeight;
    draw();
    shown.get(active)?.classList.add("active");
    element.setAttribute("aria-activedescendant", `${id}-${active}`);
  }
  function choose() {
    shown.get(selected)?.setAttribute("aria-selected", "false");
    selected = active;
    go(active);
    shown.get(active)?.setAttribute("aria-selected", "true");
    const data = pages.get(Math.floor(active / page))?.[active % page];
    if (data) open(data);
  }
  let asked = false;
  element.addEventListener("scroll", () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  });
  new ResizeObserver(draw).observe(element);
  element.addEventListener("keydown", (event) => {
    const many = Math.max(1, Math.floor(element.clientHeight / HEIGHT) - 1);
    const to = { ArrowDown: active + 1, ArrowUp: active - 1, PageDown: active + many, PageUp: active - many, Home: 0, End: total - 1 }[event.key];
    if (to !== undefined) { event.preventDefault(); go(to); } else if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); }
  });
  return { element, restart };
}
