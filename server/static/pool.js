import { $, askForKey, call, hideTip, make, served, showTip } from "./page.js";

const CACHED = 1, SHARED = 2, LISTED = 3; // codes of jaxserve/pool.py
const BUSY_MS = 500, IDLE_MS = 2000; // between two looks at the pool
const LIST_MS = 10_000; // between two looks at the list of models, while this one is in memory
const SAMPLES = 40; // of the rate

function setStatus(state, words, why = words) {
  document.body.dataset.state = state;
  $("status").textContent = words;
  $("status").title = $("status-dot").title = why;
  document.dispatchEvent(new CustomEvent("status", { detail: words }));
}

/* What a model that is not in memory is doing */
const WORDS = { unloaded: "starts when asked", waiting: "waiting for memory", starting: "starting", unloading: "stopping", failed: "failed" };

/* Whether the model is in memory. Tells the list of models what they are doing, and the page if this one is not there. */
async function isThere() {
  const isReady = document.body.dataset.state === "ready" && pool.model === served.model;
  if (!served.several || (isReady && performance.now() - pool.listed < LIST_MS)) return true;
  pool.listed = performance.now();
  const models = (await (await call("v1/models")).json()).data;
  document.dispatchEvent(new CustomEvent("models", { detail: models }));
  const { state, reason } = models.find((one) => one.id === served.model) ?? {};
  if (state === "ready") return true;
  const words = WORDS[state] ?? "not served";
  setStatus(state === "failed" ? "down" : "loading", words, reason ? `${words}: ${reason}` : words);
  return false;
}

const pool = { model: "", listed: 0, now: null, hues: new Map(), rates: [], timer: 0, looking: false, lit: null, cursor: -1, grid: null };
const ownerKey = (owner) => `${owner.request_id}#${owner.index}`;
const ownerName = (owner) => owner.request_id.split("/").pop().slice(0, 6) + (owner.index ? `·${owner.index}` : "");
const number = (value) => value.toLocaleString("en");

export async function look() {
  if (pool.looking) return;
  pool.looking = true;
  clearTimeout(pool.timer);
  const { model, several } = served;
  try {
    const query = several ? `?model=${encodeURIComponent(model)}` : "";
    const there = await isThere();
    if (!there || pool.model !== model) forget();
    pool.model = model;
    const snapshot = there && (await (await call(`pool${query}`)).json());
    if (snapshot && model === served.model) {
      setStatus("ready", "ready");
      take(snapshot);
    }
  } catch (error) {
    const words = { 400: "connecting", 401: "API key needed", 503: "not ready" }[error.status] ?? "unreachable";
    if (error.status === 401 && $("status").textContent !== words) askForKey();
    setStatus(error.status === 503 ? "loading" : "down", words);
  }
  pool.looking = false;
  const busy = pool.now?.num_running || pool.now?.num_waiting;
  pool.timer = setTimeout(() => (document.hidden ? (pool.timer = 0) : look()), busy ? BUSY_MS : IDLE_MS);
}

function forget() {
  pool.now = null;
  pool.rates = [];
  for (const name of ["running", "waiting", "rate"]) $(name).textContent = "–";
  $("owners").replaceChildren();
  $("engine").classList.add("absent");
  drawRates();
}

function take(snapshot) {
  const before = pool.now;
  pool.now = snapshot;
  $("engine").classList.remove("absent");
  if (before && snapshot.seconds > before.seconds) {
    pool.rates.push(Math.max(0, snapshot.generation_tokens - before.generation_tokens) / (snapshot.seconds - before.seconds));
    pool.rates = pool.rates.slice(-SAMPLES);
  }
  const alive = new Set(snapshot.owners.map(ownerKey));
  for (const key of pool.hues.keys()) if (!alive.has(key)) pool.hues.delete(key);
  for (const key of alive) {
    const taken = new Set(pool.hues.values());
    let place = 0;
    while (taken.has(place)) place++;
    if (!pool.hues.has(key)) pool.hues.set(key, place);
  }
  $("running").textContent = number(snapshot.num_running);
  $("waiting").textContent = number(snapshot.num_waiting);
  $("rate").textContent = pool.rates.length ? number(Math.round(pool.rates.at(-1))) : "–";
  $("pool-summary").textContent = `${number(snapshot.pages_used)} of ${number(snapshot.pages)} in use, ${snapshot.page_size} tokens each`;
  $("n-own").textContent = number(snapshot.pages_used - snapshot.pages_shared);
  $("n-shared").textContent = number(snapshot.pages_shared);
  $("n-cached").textContent = number(snapshot.pages_cached);
  $("n-free").textContent = number(snapshot.pages - snapshot.pages_used - snapshot.pages_cached);
  $("pool").setAttribute("aria-label", `KV pages: ${snapshot.pages_used} of ${snapshot.pages} in use, ${snapshot.pages_shared} shared, ${snapshot.pages_cached} cached. Arrow keys go through them.`);
  showSpeculation();
  listOwners();
  drawRates();
  draw();
}

function showSpeculation() {
  const { spec_drafts: checks, spec_proposed: proposed, spec_accepted_at: kept } = pool.now;
  $("speculation").hidden = !checks;
  if (!checks) return;
  const accepted = kept.reduce((sum, count) => sum + count, 0);
  $("spec-summary").textContent = `${(1 + accepted / checks).toFixed(2)} tokens a check, ${Math.round((100 * accepted) / proposed)}% kept`;
  const bars = $("spec-bars");
  while (bars.children.length < kept.length) bars.append(make("li"));
  kept.forEach((count, i) => {
    const share = `${((100 * count) / checks).toFixed(1)}%`;
    bars.children[i].style.setProperty("--share", share);
    bars.children[i].title = `proposal ${i + 1} was kept in ${share} of the checks`;
    bars.children[i].ariaLabel = share;
  });
  while (bars.children.length > kept.length) bars.lastChild.remove();
}

// Hues by the golden angle: neighbours differ, however many there are.
const hue = (key) => (275 + 137.508 * (pool.hues.get(key) ?? 0)) % 360;

function listOwners() {
  const list = $("owners");
  const old = new Map([...list.children].map((item) => [item.key, item]));
  const items = pool.now.owners.map((owner) => {
    const key = ownerKey(owner);
    const item = old.get(key) ?? ownerItem(key);
    const [button] = item.children, [, name, facts, progress] = button.children;
    button.style.setProperty("--hue", hue(key));
    name.textContent = ownerName(owner);
    const phase = owner.computed_tokens < owner.prompt_tokens ? "reads its prompt, " : "";
    const adapter = owner.adapter ? `${owner.adapter}: ` : "";
    facts.textContent = `${adapter}${phase}${number(owner.tokens)} tokens on ${number(owner.pages)} pages`;
    Object.assign(progress, { max: owner.max_tokens, value: owner.computed_tokens, title: `${owner.computed_tokens} of at most ${owner.max_tokens} tokens` });
    return item;
  });
  for (const item of list.children) if (!items.includes(item)) item.remove();
  items.forEach((item, place) => { if (list.children[place] !== item) list.insertBefore(item, list.children[place] ?? null); });
  $("nobody").hidden = items.length > 0;
}

function ownerItem(key) {
  const progress = make("progress");
  progress.setAttribute("aria-label", "tokens computed");
  const button = make("button", { type: "button" }, make("i"), make("code"), make("span"), progress);
  const light = (on) => { pool.lit = on ? key : null; draw(); };
  button.onpointerenter = button.onfocus = () => light(true);
  button.onpointerleave = button.onblur = () => light(false);
  return Object.assign(make("li", {}, button), { key });
}

function drawRates() {
  const top = Math.max(1, ...pool.rates);
  const points = pool.rates.map((rate, i) => `${(120 * (SAMPLES - pool.rates.length + i)) / (SAMPLES - 1)} ${26 - (22 * rate) / top}`);
  const [area, line] = $("spark").children;
  line.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
  area.setAttribute("d", points.length > 1 ? `M${points[0].split(" ")[0]} 28L${points.join("L")}L120 28Z` : "");
}

function ownersOf(cell) {
  const { cells, owners, share_cells, share_owners } = pool.now;
  if (cells[cell] === SHARED) return share_owners.filter((_, i) => share_cells[i] === cell).map((i) => owners[i]).filter(Boolean);
  return cells[cell] >= LISTED && owners[cells[cell] - LISTED] ? [owners[cells[cell] - LISTED]] : [];
}

function layout(canvas, count) {
  const width = canvas.clientWidth, most = Math.min(460, innerHeight * 0.42);
  let pitch = Math.min(26, Math.floor(Math.sqrt((width * most) / count)));
  while (pitch > 3 && Math.ceil(count / Math.floor(width / pitch)) * pitch > most) pitch--;
  const columns = Math.max(1, Math.floor(width / pitch));
  return { pitch: width / columns, columns, rows: Math.ceil(count / columns) };
}

export function draw() {
  const canvas = $("pool");
  if (!pool.now || !canvas.clientWidth) return;
  const { cells, cells_used, pages_per_cell, share_cells, share_owners, owners } = pool.now;
  const grid = (pool.grid = layout(canvas, cells.length));
  const scale = devicePixelRatio;
  canvas.style.height = `${grid.rows * grid.pitch}px`;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = grid.rows * grid.pitch * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const css = (name) => style.getPropertyValue(name).trim();
  const palette = owners.map((owner) => `oklch(${css("--own-l")} ${css("--own-c")} ${hue(ownerKey(owner))})`);
  const [free, cached, other, ink, focus] = ["--cell-free", "--cell-cached", "--cell-other", "--text", "--focus"].map(css);
  const lit = owners.findIndex((owner) => ownerKey(owner) === pool.lit);
  const shares = new Map();
  share_cells.forEach((cell, i) => shares.set(cell, [...(shares.get(cell) ?? []), share_owners[i]]));
  const gap = grid.pitch > 6 ? 2 : 1, side = grid.pitch - gap, round = Math.min(4, side / 4);
  const box = (x, y, inset = 0) => {
    pen.beginPath();
    pen.roundRect(x + inset, y + inset, side - 2 * inset, side - 2 * inset, round);
  };
  cells.forEach((code, cell) => {
    const x = (cell % grid.columns) * grid.pitch, y = Math.floor(cell / grid.columns) * grid.pitch;
    const mine = code === SHARED ? shares.get(cell) ?? [] : code >= LISTED ? [code - LISTED] : [];
    pen.globalAlpha = lit < 0 || mine.includes(lit) ? 1 : 0.22;
    box(x, y);
    pen.fillStyle = free;
    if (code !== CACHED) pen.fill();
    if (code === CACHED) {
      box(x, y, gap / 2);
      pen.strokeStyle = cached;
      pen.lineWidth = gap > 1 ? 1.5 : 1;
      pen.stroke();
    } else if (code > CACHED) {
      pen.save();
      box(x, y);
      pen.clip();
      if (pages_per_cell > 1) pen.globalAlpha *= 0.35 + (0.65 * cells_used[cell]) / pages_per_cell;
      const stripes = mine.slice(0, 4);
      if (!stripes.length) stripes.push(-1);
      stripes.forEach((owner, i) => {
        pen.fillStyle = palette[owner] ?? other;
        pen.fillRect(x + (side * i) / stripes.length, y, side / stripes.length + 0.5, side);
      });
      pen.restore();
      if (code === SHARED && side > 4) {
        box(x, y, 0.75);
        pen.strokeStyle = ink;
        pen.lineWidth = 1.5;
        pen.stroke();
      }
    }
    if (cell === pool.cursor) {
      pen.globalAlpha = 1;
      box(x, y, -0.5);
      pen.strokeStyle = focus;
      pen.lineWidth = 2.5;
      pen.stroke();
    }
  });
}

function pointAt(cell) {
  pool.cursor = cell;
  draw();
  if (cell < 0) return hideTip();
  const { cells, cells_used, pages, pages_per_cell, page_size } = pool.now;
  const first = cell * pages_per_cell + 1, last = Math.min(first + pages_per_cell - 1, pages);
  const names = ownersOf(cell).map(ownerName);
  const what = ["Free", "Cached: nobody’s, but a prompt that begins alike finds it", `Shared by ${names.join(", ") || "many"}`][cells[cell]] ?? `Owned by ${names[0] ?? "a request that is not listed"}${pages_per_cell > 1 ? ", or by it and others" : ""}`;
  const head = first === last ? `Page ${first}` : `Pages ${first} to ${last}`;
  const facts = first === last ? `${page_size} tokens` : `${cells_used[cell]} in use`;
  const canvas = $("pool").getBoundingClientRect(), { pitch, columns } = pool.grid;
  const left = canvas.left + (cell % columns) * pitch, top = canvas.top + Math.floor(cell / columns) * pitch;
  $("pool-words").textContent = `${head}, ${facts}. ${what}`;
  showTip({ left, top, width: pitch, bottom: top + pitch }, make("div", { className: "head" }, make("span", { textContent: head }), make("span", { textContent: facts })), make("p", { textContent: what }));
}

$("pool").onpointermove = $("pool").onpointerdown = (event) => {
  if (!pool.grid) return;
  const column = Math.floor(event.offsetX / pool.grid.pitch), row = Math.floor(event.offsetY / pool.grid.pitch);
  const cell = row * pool.grid.columns + column;
  pointAt(column < pool.grid.columns && cell < pool.now.cells.length ? cell : -1);
};
$("pool").onpointerleave = $("pool").onblur = () => pointAt(-1);
$("pool").onkeydown = (event) => {
  if (event.key === "Escape") return pointAt(-1);
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: pool.grid?.columns, ArrowUp: -pool.grid?.columns }[event.key];
  if (!step || !pool.now) return;
  event.preventDefault();
  const next = pool.cursor < 0 ? 0 : pool.cursor + step;
  if (next >= 0 && next < pool.now.cells.length) pointAt(next);
};

document.addEventListener("key", () => {
  setStatus("loading", "connecting");
  look();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
new ResizeObserver(draw).observe($("engine"));
look();
