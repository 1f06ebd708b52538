// What is known of one token.

const whole = new Intl.NumberFormat("en-US");
const number = (value, digits = 2) => (Number.isFinite(value) ? value.toFixed(digits).replace("-", "−")
  : Number.isNaN(value) ? "—" : value > 0 ? "∞" : "−∞");

/** A perplexity, to four digits. */
const perplexity = (value) => (Number.isFinite(value) && value >= 1e6 ? value.toExponential(2) : number(value, value < 100 ? 3 : 1));

/** A probability in percent, to three digits. */
function percent(probability) {
  if (!(probability > 0)) return "0 %";
  const value = 100 * probability;
  if (value < 0.001) return `${value.toExponential(1).replace("-", "−")} %`;
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
    // It grows and never shrinks: what stands below would jump about.
    this.height = Math.max(this.height ?? 0, this.root.offsetHeight);
    this.root.style.minHeight = `${this.height}px`;
  }

  /** Shows the cell anew if other tokens of it are key tokens now, or if there is more to be told. */
  refresh(more = false) {
    if (this.cell && (more || this.marks !== this.marked())) this.show(this.cell);
  }

  marked() {
    return this.cell ? this.mask.slice(this.cell.first, this.cell.last).join() : "";
  }

  parts(cell) {
    const parts = [];
    for (let token = cell.first; token < cell.last; token++) {
      parts.push(element("div", token > cell.first ? "more" : "", ...this.token(token)));
      if (token - cell.first === 3 && cell.last - token > 1) {
        parts.push(element("p", "", `and ${cell.last - token - 1} more tokens of this character`));
        break;
      }
    }
    return parts;
  }

  token(token) {
    const { data } = this, scored = token > 0, has = token >= data.first_short;
    const chip = this.mask[token] ? [element("span", "chip", "key token")] : [];
    const title = element("div", "token", ...visible(data.vocabulary[data.token[token]]));
    title.dir = "auto";
    const where = element("div", "where", `token ${whole.format(token)} of ${whole.format(data.count)}`);
    if (!scored) return [...chip, title, where, element("p", "", "Nothing stands before it: it is not scored.")];
    return [
      ...chip, title, where,
      element("div", "bars", ...bar("long", data.long[token]), ...bar("short", data.short[token])),
      element("div", "numbers", element("span", "", "LSD ", element("b", "", number(data.lsd[token]))),
        element("span", "", "LCL ", element("b", "", number(data.long[token]))), element("span", "", "nats")),
      this.contexts(token, has), ...this.earlier(token), ...this.judged(token), ...this.alternatives(token),
    ];
  }

  contexts(token, has) {
    const { data } = this, K = data.context_length, d = data.stride, long = whole.format(token);
    const short = has ? ` and ${whole.format(K + ((token - K) % d))} tokens` : " tokens, long and short";
    return element("div", "where", `Context of ${long}${short}.`);
  }

  earlier(token) {
    const distance = this.distances?.[token];
    if (distance === undefined) return [];
    if (distance === 0) return [element("div", "where", "Not seen before.")];
    const link = element("button", "link", `${whole.format(distance)} token${distance === 1 ? "" : "s"} before`);
    link.addEventListener("click", () => this.go(token - distance));
    return [element("div", "where", "Last seen ", link, ".")];
  }

  /** The evaluated model's tokens that share characters with it. */
  judged(token) {
    const { data } = this, judged = data.judged, from = data.start[token], to = data.stop[token];
    if (!judged || from === to) return [];
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
    return [element("div", "columns", element("div", "", element("h3", "", "evaluated model"), element("ol", "", ...found)))];
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
      return element("div", "", element("h3", "", `${name} context`), list);
    };
    return [element("div", "columns", column("long"), column("short"))];
  }
}
