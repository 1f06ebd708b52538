// The parts of the page, and the handlers of the reader's actions.

const find = (id) => document.getElementById(id);

class Page {
  constructor(data) {
    this.data = data;
    this.mask = new Uint8Array(data.count);
    markKeyTokens(data, data.alpha, data.beta, this.mask);
    this.keys = keyTokens(this.mask);
    this.view = new DocumentView(data, this.mask, find("document"));
    this.card = new Card(data, this.mask, find("card"), (token) => this.go(token));
    this.timeline = new Timeline(data, this.mask, find("timeline"), (token) => this.go(token));
    this.scatter = new Scatter(data, find("scatter"), (alpha, beta) => this.setThresholds(alpha, beta));
    this.pending = new Set();
    this.folds();
    this.thresholds();
    this.pointing();
    this.steps();
    this.window();
    this.setThresholds(data.alpha, data.beta);
  }

  /** Does something once before the next picture, however often it is asked for until then. */
  soon(name, work) {
    if (this.pending.has(name)) return;
    this.pending.add(name);
    requestAnimationFrame(() => { this.pending.delete(name); work(); });
  }

  /** Opens every fold on a wide screen. On a narrow one they begin closed, so that most of it is text. */
  folds() {
    const narrow = matchMedia("(max-width: 920px)"), folds = document.querySelectorAll("details");
    const arrange = () => folds.forEach((fold) => { fold.open = !narrow.matches; });
    narrow.addEventListener("change", arrange);
    arrange();
    for (const id of ["panel", "tune"]) {
      find(id).addEventListener("toggle", () => this.soon("folds", () => {
        this.scatter.draw();
        if (narrow.matches && this.view.current) this.view.reveal(this.view.current, 4);  // it may be covered now
      }));
    }
  }

  thresholds() {
    for (const name of ["alpha", "beta"]) {
      const field = find(name), slider = find(`${name}-slider`);
      slider.addEventListener("input", () => { field.value = slider.value; this.readThresholds(); });
      field.addEventListener("input", () => this.readThresholds());
    }
    find("alpha-slider").max = Math.max(8, Math.ceil(1.5 * this.data.alpha));
    if (this.data.beta > -Infinity) find("beta-slider").min = Math.min(-10, Math.floor(1.5 * this.data.beta));
    find("reset").addEventListener("click", () => this.setThresholds(this.data.alpha, this.data.beta));
  }

  /** Takes what the fields say, if it means something; an empty field drops beta. */
  readThresholds() {
    const alpha = find("alpha").valueAsNumber, beta = find("beta").valueAsNumber;
    const dropped = Number.isNaN(beta) && !find("beta").validity.badInput;
    if (alpha >= 0 && alpha < Infinity && (beta < 0 || dropped)) this.apply(alpha, dropped ? -Infinity : beta);
  }

  setThresholds(alpha, beta) {
    find("alpha").value = alpha;
    find("beta").value = beta > -Infinity ? beta : "";
    this.apply(alpha, beta);
  }

  apply(alpha, beta) {
    find("alpha-slider").value = alpha;
    find("beta-slider").value = Math.max(beta, find("beta-slider").min);
    find("tuned").textContent = `${alpha}, ${String(beta).replace("-Infinity", "−∞").replace("-", "−")}`;
    Object.assign(this.scatter, { alpha, beta });
    this.soon("thresholds", () => {
      markKeyTokens(this.data, this.scatter.alpha, this.scatter.beta, this.mask);
      this.keys = keyTokens(this.mask);
      this.figures();
      this.view.repaint();
      this.timeline.draw();
      this.scatter.draw();
      this.card.refresh();
      this.brief();
      this.place();
    });
  }

  figures() {
    const { data, keys } = this;
    find("count").textContent = whole.format(keys.length);
    find("share").textContent = `${number(100 * keyTokenShare(data, keys))} %`;
    find("longppl").textContent = perplexity(longPerplexity(data.long, keys));
    data.judged.forEach((judged, number) => {
      const inside = judgedKeyTokens(data, judged, keys, this.scatter.alpha, this.scatter.beta);
      const figure = find(`model-longppl-${number}`);
      figure.textContent = perplexity(longPerplexity(judged.long, inside));
      figure.title = `${whole.format(inside.length)} of its own tokens`;
    });
  }

  /** Where the current token is among the key tokens. */
  place() {
    const { keys } = this, current = this.view.current;
    const before = current ? this.after(current.last) : 0;
    const on = current && this.view.isKey(current);
    const all = `${whole.format(keys.length)} key token${keys.length === 1 ? "" : "s"}`;
    find("place").textContent = on ? `${whole.format(before)} of ${all}` : all;
    find("next").disabled = find("previous").disabled = keys.length === 0;
  }

  /** How many key tokens stand before a token. */
  after(token) {
    let low = 0, high = this.keys.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.keys[middle] < token) low = middle + 1; else high = middle;
    }
    return low;
  }

  go(token, options) {
    this.show(this.view.select(token, options));
    this.timeline.current = token;
    this.place();
    this.soon("timeline", () => this.timeline.draw());
  }

  show(cell) {
    this.card.show(cell);
    this.brief();
    this.scatter.current = cell ? cell.first : null;
    this.soon("scatter", () => this.scatter.draw());
  }

  brief() {
    find("brief").replaceChildren(...this.card.brief(this.card.cell));
  }

  pointing() {
    const article = find("document");
    const cellAt = (event) => {
      const token = event.target.closest?.(".t")?.dataset.token;
      return token === undefined ? null : this.view.cellOf(Number(token));
    };
    article.addEventListener("pointerover", (event) => { const cell = cellAt(event); if (cell) this.show(cell); });
    article.addEventListener("pointerleave", () => this.show(this.view.current));
    article.addEventListener("click", (event) => {
      const cell = cellAt(event);
      if (cell && getSelection().isCollapsed) this.go(cell.first);
    });
  }

  steps() {
    find("next").addEventListener("click", () => this.step(1));
    find("previous").addEventListener("click", () => this.step(-1));
    const help = find("help"), toggle = () => (help.open ? help.close() : help.showModal());
    for (const id of ["help-open", "help-close"]) find(id).addEventListener("click", toggle);
    addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input")) return;
      if (help.open && event.key !== "?") return;
      const within = find("document").contains(event.target), { current } = this.view;
      const moves = {
        n: () => this.step(1), p: () => this.step(-1), "?": toggle,
        ArrowRight: within && (() => this.go(current ? Math.min(current.last, this.data.count - 1) : this.start())),
        ArrowLeft: within && (() => this.go(current ? Math.max(current.first - 1, 0) : this.start())),
      };
      if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
    });
  }

  start() {
    return Math.min(this.view.tokenAt(this.view.seen()[0]), this.data.count - 1);
  }

  /** To the next key token, or the one before; round the end. */
  step(direction) {
    const { keys } = this, { current } = this.view;
    if (keys.length === 0) return;
    const index = direction > 0 ? this.after(current ? current.last : this.start())
      : this.after(current ? current.first : this.start()) - 1;
    this.go(keys[(index + keys.length) % keys.length]);
  }

  window() {
    const seen = () => {
      this.timeline.seen = this.view.seen().map((height) => this.view.tokenAt(height));
      this.timeline.draw();
    };
    addEventListener("scroll", () => this.soon("seen", seen), { passive: true });
    new ResizeObserver(() => {
      document.documentElement.style.setProperty("--bar", `${find("bar").offsetHeight}px`);
      this.soon("seen", seen);
      this.soon("scatter", () => this.scatter.draw());
    }).observe(document.body);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { seen(); this.scatter.draw(); });
  }

  /** Opens the page at the token of a link such as page.html#token-123, else at the first key token, without taking the
   *  keyboard from a page around it. */
  begin() {
    const linked = Number(/^#token-(\d+)$/.exec(location.hash)?.[1] ?? -1), isLinked = linked >= 0 && linked < this.data.count;
    if (isLinked) this.go(linked, { focus: window === parent });
    else if (this.keys.length > 0) this.go(this.keys[0], { focus: false });
  }

  /** What can wait until the document stands there. */
  async later() {
    this.card.distances = distancesToEqual(this.data);
    if (this.data.alternatives) this.card.arrays = await unpack("alternatives");
    this.card.refresh(true);
    performance.mark("longce-complete");
  }
}

async function open() {
  const page = new Page(await readScores());
  page.begin();
  performance.mark("longce-ready");
  (window.requestIdleCallback ?? setTimeout)(() => page.later());
}

open();
