// Search, order, and drawing of what is on the screen. Text enters the page through `textContent` alone.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const texts = data.texts;
const features = data.features.map(f => ({
  number: f[0], active: f[1], density: f[2], mean: f[3], max: f[4], width: f[5], counts: f[6],
  promoted: f[7], suppressed: f[8], contexts: f[9].map(c => ({activation: c[0], document: c[1], position: c[2], peak: c[3], tokens: c[4], levels: c[5]})),
}));
const LEVELS = 255, BATCH = 24, FIRST_CONTEXTS = 6;
const list = document.getElementById("features"), sentinel = document.getElementById("sentinel");
const control = name => document.getElementById(name);

function element(kind, name, text) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}
function shape(kind, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
const visible = text => text.replace(/ /g, "\u00b7").replace(/\n/g, "\u21b5").replace(/\r/g, "\u240d").replace(/\t/g, "\u21e5");
const short = x => (x !== 0 && Math.abs(x) < 0.001 ? x.toExponential(1)
  : Number(x.toPrecision(3)).toLocaleString("en", {maximumFractionDigits: 6})).replace("-", "\u2212");
const percent = x => (x < 0.000001 && x > 0 ? (100 * x).toExponential(1) : Number((100 * x).toPrecision(3))) + "%";

// What a search looks through, made when it is first needed.
const join = tokens => tokens.map(t => texts[t]).join("");
const lensOf = f => [...f.promoted, ...f.suppressed].map(p => texts[p[0]]).join("\u0000");
const activeOf = f => f.contexts.map(c => c.tokens.filter((t, i) => c.levels[i] > 0).map(t => texts[t]).join("\u0000"))
  .join("\u0000");
const anyOf = f => f.contexts.map(c => join(c.tokens)).join("\u0000") + "\u0000" + lensOf(f);
const haystacks = {any: anyOf, active: activeOf, lens: lensOf}, prepared = {any: [], active: [], lens: []};
function haystack(index, where) {
  const kept = prepared[where];
  if (kept[index] === undefined) kept[index] = haystacks[where](features[index]).toLowerCase();
  return kept[index];
}

const logit = f => f.promoted.length ? f.promoted[0][1] : -Infinity;
const orders = {
  density: (a, b) => b.density - a.density, rare: (a, b) => a.density - b.density, mean: (a, b) => b.mean - a.mean,
  max: (a, b) => b.max - a.max, logit: (a, b) => logit(b) - logit(a), number: () => 0,
};
let chosen = [], drawn = 0;

function choose() {
  const query = control("query").value, where = control("where").value;
  const numbers = /^\s*#/.test(query) ? new Set((query.match(/\d+/g) || []).map(Number)) : null;
  const text = query.toLowerCase();
  const low = control("low").value === "" ? 0 : Number(control("low").value);
  const high = control("high").value === "" ? 1 : Number(control("high").value);
  chosen = [];
  features.forEach((f, index) => {
    if (f.density < low || f.density > high) return;
    if (numbers ? !numbers.has(f.number) : text && !haystack(index, where).includes(text)) return;
    chosen.push(f);
  });
  const by = orders[control("sort").value];
  chosen.sort((a, b) => by(a, b) || a.number - b.number);
  control("shown").textContent = chosen.length + " of " + features.length + " features";
  list.replaceChildren();
  drawn = 0;
  drawMore();
  if (list.getBoundingClientRect().top < 0) list.scrollIntoView();
}

function drawMore() {
  const end = Math.min(drawn + BATCH, chosen.length);
  const part = document.createDocumentFragment();
  for (; drawn < end; drawn++) part.append(drawFeature(chosen[drawn]));
  list.append(part);
}

function drawFeature(f) {
  const card = element("article", "card feature"), head = element("header");
  card.id = "feature-" + f.number;
  const name = element("h2"), link = element("a", "", "#" + f.number);
  link.href = "#" + card.id;
  name.append(link);
  head.append(name, element("span", "", "density " + percent(f.density)), element("span", "", "mean " + short(f.mean)),
    element("span", "", "largest " + short(f.max)),
    element("span", "", f.active.toLocaleString("en") + " rows"));
  const sides = element("div", "sides"), left = element("div"), right = element("div", "contexts");
  left.append(drawCounts(f), drawLens(f));
  f.contexts.slice(0, FIRST_CONTEXTS).forEach(c => right.append(drawContext(f, c)));
  const rest = f.contexts.length - FIRST_CONTEXTS;
  if (rest > 0) {
    const more = element("button", "more", rest + " more");
    more.addEventListener("click", () => {
      more.replaceWith(...f.contexts.slice(FIRST_CONTEXTS).map(c => drawContext(f, c)));
    });
    right.append(more);
  }
  if (!f.contexts.length) right.append(element("p", "soft", "not active on any of these rows"));
  sides.append(left, right);
  card.append(head, sides);
  return card;
}

function drawContext(f, c) {
  const row = element("div", "context"), tokens = element("div", "tokens");
  const label = element("b", "", short(c.activation));
  label.title = "document " + c.document + ", token " + c.position;
  c.tokens.forEach((token, i) => {
    const level = c.levels[i], span = element("span", i === c.peak ? "peak" : "", visible(texts[token]));
    if (level > 0) span.style.backgroundColor = "rgb(217 102 43 / " + (0.08 + 0.60 * level / LEVELS).toFixed(3) + ")";
    if (level < 0) span.style.color = "var(--soft)";
    span.title = level < 0 ? "no row" : short(i === c.peak ? c.activation : level / LEVELS * f.max);
    tokens.append(span);
  });
  row.append(label, tokens);
  return row;
}

function drawCounts(f) {
  const box = shape("svg", {class: "counts", viewBox: "0 0 250 96", role: "img", "aria-label": "histogram"});
  const top = Math.max(1, ...f.counts), each = 250 / Math.max(1, f.counts.length);
  f.counts.forEach((count, i) => {
    const height = 74 * count / top;
    const bar = shape("rect", {x: i * each + 0.5, y: 78 - height, width: Math.max(0.5, each - 1), height: height});
    bar.append(shape("title", {}, short(i * f.width) + " to " + short((i + 1) * f.width) + ": " + count));
    box.append(bar);
  });
  box.append(shape("text", {x: 0, y: 92}, "0"),
    shape("text", {x: 250, y: 92, "text-anchor": "end"}, short(f.counts.length * f.width)));
  return box;
}

function drawLens(f) {
  const block = element("dl", "lens");
  for (const [name, pairs] of [["promotes", f.promoted], ["suppresses", f.suppressed]]) {
    if (!pairs.length) continue;
    const chips = element("dd");
    for (const [token, value] of pairs) {
      const chip = element("span", "chip", visible(texts[token]));
      chip.append(element("i", "", value.toFixed(2)));
      chips.append(chip);
    }
    block.append(element("dt", "", name), chips);
  }
  return block;
}

// How many features have which density, on a logarithmic axis; a click on a bar shows them.
function drawOverview() {
  const box = control("overview"), bins = 40, from = -5, wide = box.clientWidth || 1000;
  const counts = new Array(bins).fill(0);
  const bin = d => Math.min(bins - 1, Math.max(0, Math.floor((Math.log10(d) - from) / -from * bins)));
  features.forEach(f => { if (f.density > 0) counts[bin(f.density)]++; });
  const edge = i => 10 ** (from - from * i / bins), top = Math.max(1, ...counts), each = wide / bins;
  box.replaceChildren();
  box.setAttribute("viewBox", "0 0 " + wide + " 92");
  box.setAttribute("preserveAspectRatio", "none");
  counts.forEach((count, i) => {
    if (!count) return;
    const low = i ? edge(i) : 0, high = i + 1 < bins ? edge(i + 1) : 1, height = Math.max(2, 68 * count / top);
    const bar = shape("rect", {x: i * each + 1, y: 72 - height, width: each - 2, height: height});
    bar.append(shape("title", {}, count + " features of density " + percent(low) + " to " + percent(high)));
    bar.addEventListener("click", () => {
      control("low").value = low.toPrecision(4);
      control("high").value = high.toPrecision(4);
      choose();
    });
    box.append(bar);
  });
  for (let power = from; power <= 0; power++) {
    const anchor = power === from ? "start" : power === 0 ? "end" : "middle";
    box.append(shape("text", {x: (power - from) / -from * wide, y: 88, "text-anchor": anchor},
      power === from && wide > 600 ? "density " + percent(10 ** power) : percent(10 ** power)));
  }
}

let waiting = 0;
for (const name of ["query", "low", "high"]) control(name).addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(choose, 120);
});
for (const name of ["where", "sort"]) control(name).addEventListener("change", choose);
function followLink() {  // features.html#feature-12 is the address of a feature
  const place = /^#feature-(\d+)$/.exec(location.hash);
  if (!place) return;
  for (const name of ["low", "high"]) control(name).value = "";
  control("query").value = "#" + place[1];
  choose();
}
window.addEventListener("hashchange", followLink);
window.addEventListener("resize", drawOverview);
new IntersectionObserver(seen => { if (seen.some(s => s.isIntersecting) && drawn < chosen.length) drawMore(); },
  {rootMargin: "1200px"}).observe(sentinel);
drawOverview();
choose();
followLink();
