// Charts of all tokens: the timeline of key tokens in the document, and the density of tokens by LSD and LCL.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A canvas as sharp as the screen, cleared, in CSS pixels. */
function canvasContext(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas, ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `11px ${colour("--sans")}`;
  return { context, width, height };
}

/** A round step of which about `count` make up `range`. */
function tick(range, count) {
  const rough = range / count, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((step) => step * power >= rough);
}

class Timeline {
  constructor(data, mask, canvas, go) {
    Object.assign(this, { data, mask, canvas, seen: [0, 0], current: null });
    const jump = (event) => {
      const { left, width } = canvas.getBoundingClientRect();
      go(Math.min(data.count - 1, Math.max(0, Math.floor(((event.clientX - left) / width) * data.count))));
    };
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); jump(event); });
    canvas.addEventListener("pointermove", (event) => { if (event.buttons & 1) jump(event); });
  }

  draw() {
    const { context, width, height } = canvasContext(this.canvas), { data } = this, floor = height - 17;
    const x = (token) => (token / data.count) * width;
    context.fillStyle = colour("--line");
    context.globalAlpha = 0.45;
    context.fillRect(0, 4, x(Math.min(data.first_short, data.count)), floor - 4);
    context.globalAlpha = 1;
    this.bars(context, width, floor);
    context.strokeStyle = colour("--faint");
    context.strokeRect(-1, floor + 0.5, width + 2, 0);
    this.axis(context, x, width, floor);
    this.window(context, x, floor);
  }

  /** How many key tokens each stretch holds, by its height. */
  bars(context, width, floor) {
    const bins = Math.max(1, Math.min(Math.floor(width / 3), this.data.count)), counts = new Float64Array(bins);
    for (let token = 0; token < this.mask.length; token++) {
      if (this.mask[token]) counts[Math.floor((token / this.data.count) * bins)]++;
    }
    const most = Math.max(1, ...counts), size = width / bins;
    context.fillStyle = colour("--h5");
    counts.forEach((count, bin) => {
      const tall = count && Math.max(2, (count / most) * (floor - 6));
      context.fillRect(bin * size, floor - tall, Math.max(1, size - 1), tall);
    });
  }

  axis(context, x, width, floor) {
    const { data } = this, step = Math.max(1, tick(data.count, width / 110));
    context.fillStyle = colour("--muted");
    context.textBaseline = "top";
    for (let token = 0; x(token) < width - 30; token += step) {
      context.textAlign = token === 0 ? "left" : "center";
      context.fillText(token === 0 ? "token 0" : whole.format(token), x(token), floor + 4);
    }
    const edge = x(Math.min(data.first_short, data.count));
    if (edge > 150) {
      context.textAlign = "left";
      context.fillText("no short context", 6, 8);
    }
  }

  /** What the window shows of the document, and the current token. */
  window(context, x, floor) {
    const [first, last] = this.seen;
    context.strokeStyle = colour("--ink");
    context.globalAlpha = 0.75;
    context.strokeRect(Math.round(x(first)) + 0.5, 2.5, Math.max(3, Math.round(x(last) - x(first))), floor - 2);
    context.globalAlpha = 1;
    if (this.current !== null) {
      const at = x(this.current);
      context.fillStyle = colour("--ink");
      context.beginPath();
      context.moveTo(at - 4, 0);
      context.lineTo(at + 4, 0);
      context.lineTo(at, 6);
      context.fill();
    }
  }
}

class Scatter {
  constructor(data, canvas, move) {
    Object.assign(this, { data, canvas, alpha: data.alpha, beta: data.beta, current: null });
    const drag = (event) => {
      const { left, top } = canvas.getBoundingClientRect(), { x0, y0, width, height } = this.area();
      const lsd = this.low + ((event.clientX - left - x0) / width) * (this.high - this.low);
      const lcl = ((event.clientY - top - y0) / height) * this.least;
      const round = (value) => Math.round(value * 20) / 20;
      move(Math.max(0, round(lsd)), Math.min(-0.05, round(lcl)));
    };
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); drag(event); });
    canvas.addEventListener("pointermove", (event) => { if (event.buttons & 1) drag(event); });
    this.range();
  }

  /** The range of the axes: what all but a few tokens in a thousand need, judged by some thousands of tokens. */
  range() {
    const { lsd, long, count, first_short: first } = this.data, every = Math.ceil(count / 20_000);
    const quantile = (values, share) => {
      const sorted = values.filter((value, token) => token >= first && token % every === 0 && Number.isFinite(value)).sort();
      return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : 0;
    };
    this.low = Math.max(-12, Math.min(-2, quantile(lsd, 0.002)));
    this.high = Math.min(20, Math.max(4, quantile(lsd, 0.9995)));
    this.least = Math.max(-20, Math.min(-5, quantile(long, 0.01)));
  }

  area() {
    return { x0: 42, y0: 8, width: this.canvas.clientWidth - 48, height: this.canvas.clientHeight - 44 };
  }

  draw() {
    if (this.canvas.clientWidth === 0) return;  // in the closed sheet
    const { context, width: full } = canvasContext(this.canvas), { x0, y0, width, height } = this.area();
    const x = (lsd) => x0 + ((lsd - this.low) / (this.high - this.low)) * width, y = (lcl) => y0 + (lcl / this.least) * height;
    const clampX = (lsd) => Math.min(x0 + width, Math.max(x0, x(lsd))), clampY = (lcl) => Math.min(y0 + height, Math.max(y0, y(lcl)));
    context.fillStyle = colour("--accent-soft");
    context.fillRect(clampX(this.alpha), y0, x0 + width - clampX(this.alpha), clampY(this.beta) - y0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.points(width, height), x0, y0, width, height);
    context.strokeStyle = colour("--accent");
    context.strokeRect(clampX(this.alpha), y0, x0 + width - clampX(this.alpha), clampY(this.beta) - y0);
    this.axes(context, x, y, x0, y0, width, height, full);
    if (this.current !== null && this.current >= this.data.first_short) {
      context.strokeStyle = colour("--ink");
      context.lineWidth = 2;
      context.beginPath();
      context.arc(clampX(this.data.lsd[this.current]), clampY(this.data.long[this.current]), 5, 0, 7);
      context.stroke();
      context.lineWidth = 1;
    }
  }

  /** Tokens by squares of two pixels, the darker the more; a picture that is made once for a size and a colour. */
  points(width, height) {
    const columns = Math.ceil(width / 2), rows = Math.ceil(height / 2), rgb = colour("--density");
    const made = [columns, rows, rgb].join();
    if (this.made === made) return this.picture;
    const counts = this.density(columns, rows), image = new ImageData(columns, rows);
    const scale = Math.log1p(counts.reduce((most, value) => Math.max(most, value), 1)), channels = rgb.split(",").map(Number);
    counts.forEach((value, index) => {
      if (value > 0) image.data.set([...channels, 255 * (0.22 + (0.78 * Math.log1p(value)) / scale)], 4 * index);
    });
    const picture = Object.assign(document.createElement("canvas"), { width: columns, height: rows });
    picture.getContext("2d").putImageData(image, 0, 0);
    return Object.assign(this, { made, picture }).picture;
  }

  /** How many tokens lie in each square. */
  density(columns, rows) {
    const { lsd, long, count, first_short: first } = this.data, counts = new Uint32Array(columns * rows);
    for (let token = first; token < count; token++) {
      const column = Math.floor(((lsd[token] - this.low) / (this.high - this.low)) * columns);
      const row = Math.floor((long[token] / this.least) * rows);
      // Tokens beyond the right edge, most of them key tokens, are drawn at the edge.
      if (column >= 0 && row >= 0 && row < rows) counts[row * columns + Math.min(column, columns - 1)]++;
    }
    return counts;
  }

  axes(context, x, y, x0, y0, width, height, full) {
    context.strokeStyle = colour("--faint");
    context.strokeRect(x0 - 0.5, y0 - 0.5, width + 1, height + 1);
    this.scale(context, x, y0 + height + 1);
    context.fillStyle = colour("--muted");
    context.textAlign = "center";
    context.textBaseline = "top";
    const stepX = tick(this.high - this.low, 6), stepY = tick(-this.least, 4);
    for (let lsd = Math.ceil(this.low / stepX) * stepX; lsd <= this.high; lsd += stepX) {
      context.fillText(number(lsd, 0), x(lsd), y0 + height + 10);
    }
    context.fillText("LSD, nats", x0 + width / 2, y0 + height + 22);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let lcl = 0; lcl >= this.least; lcl -= stepY) context.fillText(number(lcl, 0), x0 - 5, y(lcl) + (lcl === 0 ? 3 : 0));
    context.save();
    context.translate(8, y0 + height / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText("LCL, nats", 0, 0);
    context.restore();
  }

  /** The colours of the document's tokens, where their LSD lies. */
  scale(context, x, top) {
    const borders = [...STEPS, Infinity];
    const within = (lsd) => x(Math.min(this.high, Math.max(this.low, lsd)));
    STEPS.forEach((size, index) => {
      for (const [name, sign] of [["h", 1], ["w", -1]]) {
        const from = within(sign * size), to = within(sign * borders[index + 1]);
        context.fillStyle = colour(`--${name}${index + 1}`);
        context.fillRect(Math.min(from, to), top, Math.abs(to - from), 6);
      }
    });
  }
}
