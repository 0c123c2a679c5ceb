/* What chat.js and pool.js share: making elements, asking the server, the API key, the tooltip. */

/* The model that is talked to; `several`: the server has others, too */

export const served = { model: "", several: false };

const KEY = "jaxserve-api-key";

export const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export async function call(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (response.ok) return response;
  const error = (await response.json().catch(() => ({}))).error;
  throw Object.assign(new Error(error?.message ?? error ?? `the server answered ${response.status}`), { status: response.status });
}

export function askForKey(why = "This server asks for an API key. It is kept in this tab until it is closed.") {
  if ($("key-dialog").open) return;
  $("key-why").textContent = why;
  $("key").value = sessionStorage.getItem(KEY) ?? "";
  $("key-dialog").showModal();
}

$("key-button").onclick = () => askForKey("Kept in this tab until it is closed.");
$("key-cancel").onclick = () => $("key-dialog").close();
$("key-form").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key-dialog").close();
  document.dispatchEvent(new Event("key"));
};

/* The tooltip */

export function showTip(anchor, ...content) {
  const tip = $("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, anchor.left + anchor.width / 2 - width / 2), innerWidth - width - 8);
  const above = anchor.top - height - 8, below = anchor.bottom + 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above < 56 && below + height < innerHeight ? below : above}px`;
}

export const hideTip = () => { $("tip").hidden = true; };
