// Key tokens for any thresholds, and what depends on them.

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

/** exp(-mean log-likelihood) of some tokens; NaN if there are none. */
function longPerplexity(logLikelihood, tokens) {
  let total = 0;
  for (const token of tokens) total += logLikelihood[token];
  return Math.exp(-total / tokens.length);
}

/** The evaluated model's tokens that lie wholly inside the characters of key tokens, those that touch joined. */
function judgedKeyTokens(data, keys) {
  const { start, stop } = data.judged, inside = [];
  let next = 0;
  for (let index = 0; index < keys.length;) {
    const from = data.start[keys[index]];
    let to = data.stop[keys[index]];
    for (index++; index < keys.length && data.start[keys[index]] <= to; index++) {
      to = Math.max(to, data.stop[keys[index]]);
    }
    while (next < start.length && start[next] < from) next++;
    for (; next < start.length && start[next] < to; next++) {
      if (stop[next] > start[next] && stop[next] <= to) inside.push(next);
    }
  }
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
