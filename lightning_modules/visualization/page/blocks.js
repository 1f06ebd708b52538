// The document as blocks of plain text, which the browser renders near the viewport (`content-visibility`), and which
// are split into tokens there.

const STEPS = [0.5, 1, 2, 4, 8];  // nats from which each color applies
const UNSEEN_ONLY = /^(?:(?![\t\r\n])[\p{C}\p{Zl}\p{Zp}])*$/u;  // control characters, direction marks, zero-width spaces
const WRAPPED = 0.7, LONGEST_LINE = 100;  // a wrapped line is at least this part of the usual width, and not longer
const BLOCK = 220, LONGEST_BLOCK = 660;  // tokens

/** The class of a colour: h1 .. h5 for a token that is helped, w1 .. w5 for one that is worse off. */
function shade(lsd) {
  const size = Math.abs(lsd);
  let step = 0;
  while (step < STEPS.length && size >= STEPS[step]) step++;
  return step === 0 ? "" : (lsd > 0 ? "h" : "w") + step;
}

/** Whether a block of this many tokens may end between two texts: behind a sentence, later a word, at last a letter. */
function mayEnd(before, after, size) {
  if (/[ \t]$/.test(before) || /^[ \t]/.test(after)) return size >= 2.5 * BLOCK || /[.!?…][\p{Pe}\p{Pf}"']{0,2}[ \t]?$/u.test(before);
  if (size < 2.5 * BLOCK || before.endsWith("\u200d") || /^[\p{M}\p{Emoji_Modifier}\u200d\n]/u.test(after)) return false;
  return size >= LONGEST_BLOCK || !(/[\p{L}\p{N}]$/u.test(before) && /^[\p{L}\p{N}]/u.test(after));
}

/** Cuts the document behind line breaks, and a long line where `mayEnd` allows it. */
function cutBlocks(data) {
  const { shown: text, start, stop, count } = data, firsts = [0];
  let reached = 0;  // end of the characters of all tokens so far: never cut a character that has several tokens
  for (let token = 1; token < count; token++) {
    reached = Math.max(reached, stop[token - 1]);
    const size = token - firsts.at(-1);
    if (size < BLOCK || start[token] < reached || start[token] === stop[token]) continue;
    const before = text.slice(Math.max(reached - 4, 0), start[token]), after = text.slice(start[token], start[token] + 2);
    if (before.endsWith("\n") || (size >= 2 * BLOCK && mayEnd(before, after, size))) firsts.push(token);
  }
  return firsts.map((first, index) => {
    const last = firsts[index + 1] ?? count;
    return { index, first, last, from: index === 0 ? 0 : start[first], to: last < count ? start[last] : text.length };
  });
}

/** The stretches of a block that are shown as one: a token, or several that share a character. */
function cellsOf(data, block, graphemes) {
  const { start, stop } = data, cells = [];
  const joined = inside(data.text.slice(block.from, block.to), graphemes);
  for (let token = block.first; token < block.last; token++) {
    const cell = cells.at(-1);
    const empty = start[token] === stop[token];
    if (cell && (empty || cell.to === cell.from || start[token] < cell.to || joined.has(start[token] - block.from))) {
      if (!empty && cell.to === cell.from) cell.from = start[token];  // the first ones had no characters
      cell.to = Math.max(cell.to, stop[token]);
      cell.last = token + 1;
    } else {
      cells.push({ first: token, last: token + 1, from: start[token], to: stop[token] });
    }
  }
  return cells;
}

/** Positions inside of what a reader takes for one character, such as a letter and its accent, or a family of emoji. */
function inside(text, graphemes) {
  const positions = new Set();
  if (graphemes && /[^\x00-\x7f]|\r/.test(text)) {
    for (const { index, segment } of graphemes.segment(text)) {
      for (let within = 1; within < segment.length; within++) positions.add(index + within);
    }
  }
  return positions;
}

/** Joins lines that a text wraps at a width, as Project Gutenberg does, for display only: each line break within a
 *  paragraph becomes a space, so that positions stay the same. Short lines (verse, lists, code) are kept. */
function joinLines(text) {
  const within = /[^\n]\n(?=[^\s])/g, lengths = [];  // breaks between two lines that are not blank or indented
  const lengthBefore = (at) => at - text.lastIndexOf("\n", at - 1) - 1;
  for (const { index } of text.matchAll(within)) lengths.push(lengthBefore(index + 1));
  const width = lengths.toSorted((one, other) => one - other)[Math.floor(0.9 * lengths.length)];
  const wrapped = lengths.filter((length) => length >= WRAPPED * width && length <= width + 12).length;
  if (lengths.length < 10 || width > LONGEST_LINE || wrapped < 0.5 * lengths.length) return text;
  return text.replace(within, (found, index) => {
    const length = lengthBefore(index + 1);
    return length >= WRAPPED * width && length <= LONGEST_LINE ? `${found[0]} ` : found;
  });
}

class DocumentView {
  constructor(data, mask, article) {
    Object.assign(this, { data, mask, article, current: null, filled: new Set() });
    this.graphemes = typeof Intl.Segmenter === "function" ? new Intl.Segmenter() : null;
    this.blocks = cutBlocks(data);
    const columns = Math.max(20, Math.min(article.clientWidth, 700) / 8.1), fragment = new DocumentFragment();
    for (const block of this.blocks) {
      const text = data.shown.slice(block.from, block.to), element = document.createElement("div");
      const lines = text.split("\n").reduce((sum, line) => sum + Math.max(1, Math.ceil(line.length / columns)), 0);
      element.className = block.to < data.shown.length && !text.endsWith("\n") ? "block soft" : "block";
      element.style.containIntrinsicSize = `auto ${Math.round(29.2 * (lines - text.endsWith("\n")))}px`;
      element.textContent = text;
      element.dataset.block = block.index;
      fragment.append(block.element = element);
    }
    article.replaceChildren(fragment);
    this.watch();
  }

  /** Splits blocks that come near the window into cells: all of a book at once would take seconds. */
  watch() {
    const near = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) {
        if (isIntersecting) this.fill(this.blocks[target.dataset.block]);
      }
    }, { rootMargin: "60% 0%" });
    for (const { element } of this.blocks) near.observe(element);
  }

  fill(block) {
    if (this.filled.has(block)) return;
    block.cells = cellsOf(this.data, block, this.graphemes);
    const fragment = new DocumentFragment();
    let at = block.from;
    for (const cell of block.cells) {
      if (cell.from > at) fragment.append(this.data.shown.slice(at, cell.from));
      cell.element = document.createElement("span");
      cell.element.textContent = this.data.shown.slice(cell.from, cell.to);
      cell.element.dataset.token = cell.first;
      cell.name = "";
      cell.style = this.styleOf(cell);
      this.paint(cell);
      fragment.append(cell.element);
      at = Math.max(at, cell.to);
    }
    fragment.append(this.data.shown.slice(at, block.to));
    block.element.replaceChildren(fragment);
    this.filled.add(block);
  }

  /** The classes of a cell that no threshold changes. */
  styleOf(cell) {
    let lsd = 0;
    for (let token = cell.first; token < cell.last; token++) lsd += this.data.lsd[token];
    const text = this.data.shown.slice(cell.from, cell.to);
    const sight = /^\s*\n\s*$/.test(text) ? "newline" : UNSEEN_ONLY.test(text) ? "hidden" : "";
    return ["t", shade(lsd), cell.last <= this.data.first_short ? "n" : "", sight].filter(Boolean).join(" ");
  }

  isKey(cell) {
    for (let token = cell.first; token < cell.last; token++) if (this.mask[token]) return true;
    return false;
  }

  paint(cell) {
    const name = cell.style + (this.isKey(cell) ? " k" : "") + (cell === this.current ? " current" : "");
    if (cell.name !== name) cell.element.className = cell.name = name;
  }

  /** Marks key tokens anew where they can be seen; other blocks are marked when they are filled. */
  repaint() {
    for (const block of this.filled) for (const cell of block.cells) this.paint(cell);
  }

  blockOf(token) {
    let low = 0, high = this.blocks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.blocks[middle].first <= token) low = middle; else high = middle - 1;
    }
    return this.blocks[low];
  }

  cellOf(token) {
    const block = this.blockOf(token);
    this.fill(block);
    return block.cells.find((cell) => token < cell.last);
  }

  /** Makes a token the current one and brings it into view. */
  select(token, { scroll = true, focus = true } = {}) {
    const last = this.current;
    this.current = this.cellOf(token);
    if (last?.element) this.paint(last);
    this.paint(this.current);
    this.current.element.tabIndex = -1;
    if (focus) this.current.element.focus({ preventScroll: true });
    if (scroll) this.reveal(this.current, 4);
    return this.current;
  }

  /** Scrolls to a cell; again while blocks on the way there turn out higher or lower than they were taken for. */
  reveal(cell, tries) {
    const { top, bottom } = cell.element.getBoundingClientRect(), [from, to] = this.seen();
    if (top > from + 20 && bottom < to - 20) return;
    scrollBy({ top: (top + bottom - from - to) / 2, behavior: "instant" });
    if (tries > 0) requestAnimationFrame(() => cell === this.current && this.reveal(cell, tries - 1));
  }

  /** The heights between which the window shows the document: below the bar, and above the card if it lies there. */
  seen() {
    const card = document.querySelector("aside"), fixed = getComputedStyle(card).position === "fixed";
    const bar = document.getElementById("bar").getBoundingClientRect();
    return [bar.bottom, fixed ? card.getBoundingClientRect().top : innerHeight];
  }

  /** The token at a height of the window, about. */
  tokenAt(height) {
    let low = 0, high = this.blocks.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.blocks[middle].element.getBoundingClientRect().bottom > height) high = middle; else low = middle + 1;
    }
    const { first, last, element } = this.blocks[low], { top, height: size } = element.getBoundingClientRect();
    return Math.round(first + (last - first) * Math.min(1, Math.max(0, (height - top) / Math.max(size, 1))));
  }
}
