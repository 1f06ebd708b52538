// The card with the details of one token.

const whole = new Intl.NumberFormat("en-US");
const number = (value, digits = 2) => (Number.isFinite(value) ? value.toFixed(digits).replace("-", "−")
  : Number.isNaN(value) ? "—" : value > 0 ? "∞" : "−∞");

/** A perplexity, to four digits. */
const perplexity = (value) => (Number.isFinite(value) && value >= 1e6 ? value.toExponential(2) : number(value, value < 100 ? 3 : 1));

/** A probability in percent, to three digits. */
function percent(probability) {
  if (!(probability > 0)) return "0 %";
  const value = 100 * probability;
  if (value < 0.001) return "<0.001 %";
  return `${value >= 99.95 ? value.toFixed(2) : value.toPrecision(3)} %`;
}

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

const UNSEEN = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };

/** A token's text in which spaces, line breaks and what cannot be seen are seen. */
function visible(text) {
  const parts = [];
  for (const part of text.split(/([\s\p{C}])/u)) {
    if (part === "") continue;
    const unseen = /^[\s\p{C}]$/u.test(part);
    const code = () => `U+${part.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
    parts.push(unseen ? element("span", "unseen", UNSEEN[part] ?? code()) : part);
  }
  return parts;
}

const bar = (name, logLikelihood) => {
  const fill = element("div", "fill"), probability = Math.exp(logLikelihood);
  fill.style.width = `${100 * Math.min(1, probability || 0)}%`;
  return [element("span", "", name), element("div", `track ${name}`, fill), element("span", "", percent(probability))];
};

class Card {
  constructor(data, mask, root, go) {
    Object.assign(this, { data, mask, root, go, arrays: null, distances: null, cell: null });
    this.hint = [...root.childNodes];
  }

  /** Shows a cell, or how to choose one. */
  show(cell) {
    this.cell = cell;
    this.marks = this.marked();
    this.root.replaceChildren(...(cell ? this.parts(cell) : this.hint));
    // The card grows up to a height and never shrinks, so that the content below does not jump.
    this.height = Math.max(this.height ?? 0, Math.min(this.root.offsetHeight, 480));
    this.root.style.minHeight = `${this.height}px`;
  }

  /** Shows the cell anew if other tokens of it are key tokens now, or if there is more to be told. */
  refresh(more = false) {
    if (this.cell && (more || this.marks !== this.marked())) this.show(this.cell);
  }

  /** A cell in a few words, for the handle of the closed sheet. */
  brief(cell) {
    if (!cell) return ["Choose a token for its details"];
    const { data } = this, text = element("bdi", "", ...visible(data.text.slice(cell.from, cell.to)));
    const token = Math.max(cell.first, data.unscored);  // special tokens may share the cell of the first word
    if (token >= cell.last) return [text, " not scored"];
    return [text, ` LSD ${number(data.lsd[token])}, LCL ${number(data.long[token])} `, ...this.chip(token)];
  }

  chip(token) {
    return this.mask[token] ? [element("span", "chip", "key token")] : [];
  }

  marked() {
    return this.cell ? this.mask.slice(this.cell.first, this.cell.last).join() : "";
  }

  parts(cell) {
    const tokens = Array.from({ length: cell.last - cell.first }, (_, index) => cell.first + index);
    // A character may have many tokens: show key tokens first, then others until there is no more room.
    const shown = tokens.toSorted((one, other) => this.mask[other] - this.mask[one]).slice(0, 4);
    const parts = shown.map((token, index) => element("div", index > 0 ? "more" : "", ...this.token(token, cell)));
    const more = tokens.length - shown.length;
    return more > 0 ? [...parts, element("p", "", `and ${more} more token${more > 1 ? "s" : ""} of this character`)] : parts;
  }

  token(token, cell) {
    const { data } = this, scored = token >= data.unscored;
    const chip = this.chip(token);
    const title = element("div", "token", ...visible(data.vocabulary[data.token[token]]));
    title.dir = "auto";
    const part = cell.last - cell.first > 1 ? `, part of ${data.text.slice(cell.from, cell.to)}` : "";
    const where = element("div", "where", `token ${whole.format(token)} of ${whole.format(data.count)}${part}`);
    if (!scored) return [...chip, title, where, element("p", "", "Not scored: it has no context, or is a special token before the text.")];
    return [
      ...chip, title, where,
      element("div", "bars", ...bar("long", data.long[token]), ...bar("short", data.short[token])),
      element("div", "numbers", element("span", "", "LSD ", element("b", "", number(data.lsd[token]))),
        element("span", "", "LCL ", element("b", "", number(data.long[token]))), element("span", "", "nats")),
      this.contexts(token), ...this.earlier(token), ...this.judged(token), ...this.alternatives(token),
    ];
  }

  contexts(token) {
    const short = this.shortContext(token), both = short < token ? ` and ${whole.format(short)} tokens` : " tokens, long and short";
    return element("div", "where", `Context of ${whole.format(token)}${both}.`);
  }

  /** How many tokens the short context of a token has; all before it if there is none. */
  shortContext(token) {
    const { context_length: K, stride: d, first_short: first } = this.data;
    return token < first ? token : K + ((token - K) % d);
  }

  earlier(token) {
    const distance = this.distances?.[token];
    if (distance === undefined) return [];
    if (distance === 0) return [element("div", "where", "First occurrence.")];
    const link = element("button", "link", `${whole.format(distance)} token${distance === 1 ? "" : "s"} before`);
    link.addEventListener("click", () => this.go(token - distance));
    const beyond = distance > this.shortContext(token) ? " (long context only)." : ".";
    return [element("div", "where", "Previous occurrence: ", link, beyond)];
  }

  /** The evaluated models' tokens that share characters with it, side by side. */
  judged(token) {
    const { data } = this;
    if (data.judged.length === 0 || data.start[token] === data.stop[token]) return [];
    return [element("div", "columns", ...data.judged.map((model) => this.judgedBy(model, token)))];
  }

  judgedBy(judged, token) {
    const { data } = this, from = data.start[token], to = data.stop[token];
    let low = 0, high = judged.start.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (judged.stop[middle] <= from) low = middle + 1; else high = middle;
    }
    const found = [];
    for (; low < judged.start.length && judged.start[low] < to && found.length < 4; low++) {
      if (judged.stop[low] === judged.start[low]) continue;
      const text = element("span", "", ...visible(data.text.slice(judged.start[low], judged.stop[low])));
      const says = low === 0 ? "not scored" : percent(Math.exp(judged.long[low]));
      found.push(element("li", "", text, element("span", "", says)));
    }
    const title = data.judged.length > 1 ? judged.name : "evaluated model";
    return element("div", "", element("h2", "", title), element("ol", "", ...found));
  }

  alternatives(token) {
    const { data } = this;
    if (!data.alternatives) return [];
    if (!this.arrays) return [element("div", "columns", "…")];
    const column = (name) => {
      const list = element("ol", "");
      for (const { text, probability, own } of alternativesOf(data, this.arrays, name, token)) {
        list.append(element("li", own ? "own" : "", element("span", "", ...visible(text)), element("span", "", percent(probability))));
      }
      return element("div", "", element("h2", "", `${name} context`), list);
    };
    return [element("div", "columns", column("long"), column("short"))];
  }
}
