// Key tokens for any thresholds, and the figures that depend on them.

/** Fills `mask` for the thresholds: LSD > alpha and LCL > beta, both strict, in float32 as torch compares. */
function markKeyTokens(data, alpha, beta, mask) {
  const least = Math.fround(alpha), floor = Math.fround(beta), { lsd, long } = data;
  for (let token = 0; token < mask.length; token++) mask[token] = lsd[token] > least && long[token] > floor;
}

/** The numbers of the key tokens, ascending. */
function keyTokens(mask) {
  const tokens = [];
  for (let token = 0; token < mask.length; token++) if (mask[token]) tokens.push(token);
  return tokens;
}

/** The fraction of the scored tokens that are key tokens. */
const keyTokenShare = (data, keys) => keys.length / Math.max(data.count - data.unscored, 1);

/** exp(-mean log-likelihood) of some tokens; NaN if there are none. */
function longPerplexity(logLikelihood, tokens) {
  let total = 0;
  for (const token of tokens) total += logLikelihood[token];
  return Math.exp(-total / tokens.length);
}

/** For each token the number of its unit, ascending: tokens that share a character are one. -1 for one without any. */
function characterUnits({ start, stop }) {
  const unit = new Int32Array(start.length).fill(-1);
  for (let token = 0, last = -1, reach = 0; token < unit.length; token++) {
    if (stop[token] === start[token]) continue;
    if (start[token] >= reach) last++;
    reach = Math.max(reach, stop[token]);
    unit[token] = last;
  }
  return unit;
}

/** Start and stop of each unit of tokens. */
function unitSpans({ start, stop }, unit) {
  const spans = [];
  for (let token = 0; token < unit.length; token++) {
    if (unit[token] < 0) continue;
    const [from, to] = spans[unit[token]] ?? [start[token], stop[token]];
    spans[unit[token]] = [Math.min(from, start[token]), Math.max(to, stop[token])];
  }
  return spans;
}

/** Spans of characters of the evaluator's key units, those that touch joined; likelihoods of a unit's tokens add up. */
function keySpans(data, alpha, beta) {
  const unit = characterUnits(data), spans = unitSpans(data, unit);
  const long = new Float32Array(spans.length), short = new Float32Array(spans.length);
  for (let token = 0; token < unit.length; token++) {
    if (unit[token] < 0) continue;
    long[unit[token]] += data.long[token];
    short[unit[token]] += data.short[token];
  }
  const lsd = long.map((value, index) => value - short[index]), mask = new Uint8Array(spans.length), joined = [];
  markKeyTokens({ lsd, long }, alpha, beta, mask);
  for (const index of keyTokens(mask)) {
    const [from, to] = spans[index], last = joined.at(-1);
    if (last && from <= last[1]) last[1] = Math.max(last[1], to); else joined.push([from, to]);
  }
  return joined;
}

/** An evaluated model's key tokens: the evaluator's own if both read the same, else those inside its key spans.
 *  Token 0 is not scored. */
function judgedKeyTokens(data, judged, keys, alpha, beta) {
  if (judged.same_tokens !== null) {
    const [first, stop, own] = judged.same_tokens;
    return keys.filter((token) => token >= first && token < stop).map((token) => token - first + own).filter(Boolean);
  }
  const unit = characterUnits(judged), units = unitSpans(judged, unit), inside = [];
  const joined = keySpans(data, alpha, beta);
  let next = 0;
  const isInside = units.map(([from, to]) => {
    while (next < joined.length && joined[next][1] <= from) next++;
    return next < joined.length && joined[next][0] <= from && to <= joined[next][1];
  });
  for (let token = 1; token < unit.length; token++) if (isInside[unit[token]]) inside.push(token);
  return inside;
}

/** For each token how far back the last equal one stands, spaces aside; 0 if there is none. */
function distancesToEqual(data) {
  const distance = new Uint32Array(data.count), last = new Map();
  for (let token = 0; token < data.count; token++) {
    const text = data.vocabulary[data.token[token]].trim();
    if (text === "") continue;
    if (last.has(text)) distance[token] = token - last.get(text);
    last.set(text, token);
  }
  return distance;
}
