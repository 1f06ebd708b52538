// Shows how many documents and tokens a threshold keeps. THRESHOLDS has, for each column, rows of
// [threshold, documents above it, their tokens]; TOTAL is [documents, tokens], and SQL has the columns in conditions.
const metric = document.getElementById("metric");
const slider = document.getElementById("threshold");
const kept = document.getElementById("kept");

function show() {
  const rows = THRESHOLDS[metric.value];
  if (!rows.length) {
    kept.value = "No document has a value.";
    return;
  }
  slider.max = rows.length - 1;
  const [threshold, documents, tokens] = rows[slider.value];
  const part = (count, whole, name) =>
    `${count.toLocaleString("en-US")} ${name} (${((100 * count) / Math.max(whole, 1)).toFixed(1)}%)`;
  kept.value = `${part(documents, TOTAL[0], "documents")} and ${part(tokens, TOTAL[1], "tokens")}:` +
    ` --where "${SQL[metric.value]} > ${threshold}"`;
  slider.setAttribute("aria-valuetext", `above ${threshold}: ${documents} documents, ${tokens} tokens`);
}

metric.addEventListener("change", () => { slider.value = 0; show(); });
slider.addEventListener("input", show);
show();
