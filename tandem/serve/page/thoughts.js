// What a model thinks before it speaks: shown apart, quieter and foldable, and kept in votes.

import { h } from "./dom.js";

const BEGINS = "<think>\n", ENDS = "\n</think>\n\n";

/**
 * An answer in one text, as training data has it. Thoughts without words have not ended, and data
 * cannot say so: they are left out. Words that have thoughts of their own keep these.
 */
export function said({ thoughts, text }) {
  return !thoughts || !text || text.trimStart().startsWith("<think>") ? text : BEGINS + thoughts + ENDS + text;
}

/** The thoughts and the words of an answer in one text. */
export function parted(whole) {
  if (!whole.startsWith(BEGINS)) return { thoughts: "", text: whole };
  const [thoughts, ...words] = whole.slice(BEGINS.length).split(ENDS);
  return { thoughts, text: words.join(ENDS) };
}

/**
 * Thoughts that can be folded. `answer` has thoughts and text, and keeps what the user chose in
 * `unfolded`; until then they are open as long as no words have come.
 */
export function thoughtsOf(answer, ...content) {
  const folded = h("details", { class: "thoughts" }, h("summary", { on: { click: () => { answer.unfolded = !folded.open; } } }, "Thoughts"),
    content.length ? content : h("p", { class: "text", dir: "auto" }));
  foldThoughts(folded, answer);
  return folded;
}

/** Open or fold them, as they are to be by now. */
export function foldThoughts(folded, answer) {
  folded.open = answer.unfolded ?? !answer.text;
}
