// An answer token by token, colored by one of its numbers. Arrow keys move through the tokens.

import { h, show } from "./dom.js";
import { number, short } from "./format.js";

export const MEASURES = {
  kl: { label: "KL", unit: "nats", about: "log(policy / reference) of the token" },
  values: { label: "value", unit: "reward units", about: "what the critic expects from here on" },
  logprobs: { label: "log-prob", unit: "nats", about: "log-probability of the token", oneSided: true },
  advantages: { label: "advantage", unit: "", about: "how much better than expected, as the update read it" },
  rewards: { label: "reward", unit: "reward units", about: "the score at the last token, less the KL penalty" },
  returns: { label: "return", unit: "reward units", about: "what the critic learned: advantage before whitening plus value" },
  ref_logprobs: { label: "reference log-prob", unit: "nats", about: "log-probability under the reference", oneSided: true },
};

/** The measures that an answer has, as [name, label]. */
export function measuresOf(columns) {
  return Object.keys(MEASURES).filter((name) => columns[name]?.length).map((name) => [name, MEASURES[name].label]);
}

/** The size at which a color is full: the 95th percentile, so that one token does not hide the rest. */
export function scaleOf(values) {
  const sizes = values.map((x) => Math.abs(number(x))).filter(Number.isFinite).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(0.95 * sizes.length))] || sizes.at(-1) : 0;
}

function shade(value, scale, oneSided) {
  if (!Number.isFinite(value) || !scale) return "";
  const level = Math.min(4, Math.round((4 * Math.abs(value)) / scale));
  if (level === 0) return "";
  return `heat-${value < 0 && !oneSided ? "n" : "p"}${level}`;
}

/** Control characters and line ends, visible. */
function visible(piece) {
  return piece.replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
    (c) => `\\x${c.charCodeAt(0).toString(16).padStart(2, "0")}`).replaceAll("\n", "↵\n");
}

/**
 * Tokens as text. `columns` holds lists by measure; `measure` colors ("" for none).
 * The first `thoughts` of them are put where `fold` says, a function from elements to one.
 * Returns an element whose numbers appear below it on hover, focus and with the arrow keys.
 */
export function tokenText(tokens, columns, measure, label = "Tokens of the answer", thoughts = 0, fold = undefined) {
  const about = MEASURES[measure];
  const values = about ? columns[measure] || [] : [];
  const scale = scaleOf(values);
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const spans = tokens.map((token, index) => h("span", {
    class: `token ${about ? shade(number(values[index]), scale, about.oneSided) : ""}`, "data-index": index,
  }, visible(token)));
  let current = -1;
  const full = scale ? `Full color at ${short(scale)}${about?.unit ? ` ${about.unit}` : ""}.`
    : values.some((x) => Number.isFinite(number(x))) ? "It is 0 for every token." : "No token has one.";
  const rest = about
    ? `${about.label}: ${about.about}. ${full}`
    : "Point at a token, or use the arrow keys, to see its numbers.";
  readout.textContent = rest;
  const go = (index) => {
    spans[current]?.classList.remove("current");
    current = index;
    const span = spans[index];
    if (!span) { readout.textContent = rest; return; }
    span.classList.add("current");
    const parts = Object.keys(MEASURES).filter((name) => columns[name]?.length > index)
      .map((name) => `${MEASURES[name].label} ${short(columns[name][index], 4)}`);
    show(readout, tokens[index] === "" ? "(of the character before)" : h("code", {}, JSON.stringify(tokens[index])), ` ${index + 1} of ${tokens.length}: ${parts.join(", ") || "no numbers"}`);
  };
  const text = h("div", {
    class: "tokens", tabindex: 0, role: "group", dir: "auto", "aria-label": `${label}; the arrow keys show each token's numbers`,
    on: {
      pointerover: (event) => { const i = event.target.dataset?.index; if (i !== undefined) go(Number(i)); },
      pointerleave: () => go(-1),
      focus: () => { if (current < 0) go(0); },
      blur: () => go(-1),
      keydown: (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (step) { go(Math.min(tokens.length - 1, Math.max(0, current + step))); event.preventDefault(); }
        else if (event.key === "Home") { go(0); event.preventDefault(); }
        else if (event.key === "End") { go(tokens.length - 1); event.preventDefault(); }
      },
    },
  }, thoughts ? [fold(spans.slice(0, thoughts)), spans.slice(thoughts)] : spans);
  return h("div", { class: "tokenview" }, text, readout);
}

/** A token sequence colored by its mask: what is learned, and what is only read. */
export function maskedText(tokens, learned, label) {
  return h("p", { class: "tokens", dir: "auto", "aria-label": label, role: "group" }, tokens.map((token, index) =>
    h("span", { class: learned[index] ? "token learned" : "token context" }, visible(token))));
}
