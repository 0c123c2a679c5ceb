/* The page at /docs: openapi.json as a list of operations, each with its fields and a form to try it. */

import { $, askForKey, call, make } from "./page.js";

const MOST_SHOWN = 200_000; // characters of an answer
const GROUPS = [
  ["Ollama's API", (path) => path.startsWith("/api/")],
  ["llama.cpp's API", (path) => ["/completion", "/completions", "/infill", "/apply-template", "/props", "/slots"].includes(path)],
  ["Triton's API", (path) => /^\/v2($|\/(health|models|repository)\/)/.test(path)],
  ["OpenAI's and other APIs", (path) => path.startsWith("/v1") || path.startsWith("/v2")],
  ["The server", () => true],
];
let schemas = {};

const resolve = (schema) => (schema?.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema) ?? {};

/* What a field takes, in words. */
function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return [...new Set(schema.anyOf.map(kind))].filter((name) => name !== "null").join(" or ");
  if (schema.enum) return schema.enum.filter((value) => value !== null).map((value) => JSON.stringify(value)).join(", ") || "null";
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${schema.items ? kind(schema.items) : "anything"}`;
  return [schema.type ?? "anything"].flat().filter((name, _, all) => name !== "null" || all.length === 1).join(" or ");
}

const BOUNDS = { minimum: "at least", exclusiveMinimum: "more than", maximum: "at most", minLength: "characters ≥", maxLength: "characters ≤", minItems: "items ≥", maxItems: "items ≤", maxProperties: "members ≤", pattern: "matches" };

function bounds(schema) {
  const own = Object.entries(BOUNDS).filter(([name]) => name in schema).map(([name, words]) => `${words} ${schema[name]}`);
  return [...own, ...(schema.anyOf ?? []).flatMap((part) => (part.$ref ? [] : bounds(part)))];
}

/* The objects that a field may hold. */
function inner(schema) {
  if (schema.$ref) return resolve(schema).properties ? [schema.$ref] : [];
  return [...(schema.anyOf ?? []), ...(schema.items ? [schema.items] : [])].flatMap(inner);
}

function fields(schema, depth = 0) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const about = make("td", {}, kind(field));
    const more = bounds(field);
    if (more.length) about.append(make("br"), make("small", { textContent: more.join(", ") }));
    for (const one of [field, ...(field.anyOf ?? [])]) if (one.description) about.append(make("br"), make("small", { textContent: one.description }));
    for (const ref of depth < 4 ? new Set(inner(field)) : []) {
      const details = make("details", {}, make("summary", { textContent: ref.split("/").at(-1) }));
      details.addEventListener("toggle", () => details.append(fields(resolve({ $ref: ref }), depth + 1)), { once: true });
      about.append(details);
    }
    const label = make("td", {}, name);
    if (schema.required?.includes(name)) label.append(" ", make("b", { textContent: "required" }));
    return make("tr", {}, label, about);
  });
  return make("table", {}, ...rows);
}

/* A body to begin with: the required fields, and the first form of those that exclude each other. */
function example(schema, name = "") {
  schema = resolve(schema);
  if (schema.enum) return schema.enum.find((value) => value !== null) ?? null;
  if ("const" in schema) return schema.const;
  if (schema.anyOf && !schema.properties) return example(schema.anyOf.find((part) => part.type !== "null") ?? {}, name);
  const type = [schema.type].flat()[0];
  if (type === "object") {
    const rule = schema.allOf?.flatMap((one) => one.anyOf ?? []).find((one) => one.required);
    const asked = new Set([...(schema.required ?? []), ...("model" in (schema.properties ?? {}) ? ["model"] : []), ...(schema.required ? [] : (rule?.required ?? []))]);
    return Object.fromEntries([...asked].filter((field) => field in (schema.properties ?? {})).map((field) => [field, example(schema.properties[field], field)]));
  }
  if (type === "array") return schema.minItems || ["messages", "input"].includes(name) ? [example(schema.items ?? {}, name)] : [];
  if (type === "integer" || type === "number") return Math.max(schema.minimum ?? 1, name === "max_tokens" ? 64 : 1);
  if (type === "boolean") return false;
  return name === "role" ? "user" : "Hello";
}

function sending(method, path, schema) {
  const body = schema && make("textarea", { spellcheck: false, value: JSON.stringify(bodyFor(schema), null, 2), ariaLabel: `Body of ${path}` });
  const state = make("span");
  const answer = make("pre", { hidden: true });
  const button = make("button", { type: "button", textContent: "Send" });
  let running = null;
  button.onclick = async () => {
    if (running) return running.abort();
    running = new AbortController();
    button.textContent = "Stop";
    answer.hidden = false;
    answer.className = answer.textContent = state.textContent = "";
    const began = performance.now();
    try {
      const response = await call(path.slice(1), body && JSON.parse(body.value), running.signal);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await reader.read(); !part.done && answer.textContent.length < MOST_SHOWN; part = await reader.read()) answer.append(part.value);
      if (response.headers.get("content-type")?.startsWith("application/json")) answer.textContent = JSON.stringify(JSON.parse(answer.textContent), null, 2);
      state.textContent = `${response.status}, ${((performance.now() - began) / 1000).toFixed(2)} s`;
    } catch (error) {
      if (error.name !== "AbortError") answer.className = "bad";
      answer.append(error.name === "AbortError" ? "\n(stopped)" : error.message);
      state.textContent = error.status ?? "";
      if (error.status === 401) askForKey();
    }
    running = null;
    button.textContent = "Send";
  };
  return make("div", { className: "try" }, ...(body ? [body] : []), make("div", { className: "row" }, button, state), answer);
}

function bodyFor(schema) {
  const whole = resolve(schema.anyOf ? schema.anyOf[0] : schema);
  const body = example(whole);
  const asks = ["messages", "prompt", "input", "content"].filter((name) => name in whole.properties);
  if (asks[0] === "messages" && !asks.some((name) => name !== "messages" && name in body)) body.messages = [{ role: "user", content: "Hello" }];
  else if (asks.length && !asks.some((name) => name in body)) body[asks[0]] = "Hello";
  return body;
}

function operation(method, path, described, parameters) {
  const content = described.requestBody?.content ?? {};
  const schema = content["application/json"]?.schema;
  const body = schema ?? content["multipart/form-data"]?.schema;
  const whole = body?.anyOf ? body.anyOf.map(resolve) : body ? [resolve(body)] : [];
  const details = make("details", { className: "operation" }, make("summary", {}, make("i", { className: `method ${method}`, textContent: method.toUpperCase() }), make("code", { textContent: path }), make("span", { textContent: described.summary })));
  details.dataset.words = [path, method, described.summary, ...whole.flatMap((one) => Object.keys(one.properties ?? {}))].join(" ").toLowerCase();
  details.addEventListener("toggle", () => {
    const inside = make("div", { className: "inside" });
    for (const one of whole) {
      if (one.description) inside.append(make("p", { textContent: one.description }));
      inside.append(fields(one));
    }
    for (const one of [...(described.parameters ?? []), ...parameters]) inside.append(make("p", { textContent: `${one.name} (${one.in}): ${kind(one.schema)}` }));
    if (!path.includes("{") && (method === "get" || schema)) inside.append(sending(method, path, schema));
    details.append(inside);
  }, { once: true });
  return details;
}

async function load() {
  let document_;
  try {
    document_ = await (await call("openapi.json")).json();
  } catch (error) {
    $("state").textContent = error.message;
    if (error.status === 401) askForKey();
    return;
  }
  schemas = document_.components.schemas;
  $("version").textContent = `version ${document_.info.version}`;
  const groups = new Map(GROUPS.map(([name]) => [name, []]));
  for (const [path, methods] of Object.entries(document_.paths)) {
    const [name] = GROUPS.find(([, fits]) => fits(path));
    for (const [method, described] of Object.entries(methods)) {
      if (method !== "parameters") groups.get(name).push(operation(method, path, described, methods.parameters ?? []));
    }
  }
  const shown = ["OpenAI's and other APIs", "Ollama's API", "llama.cpp's API", "Triton's API", "The server"];
  $("paths").replaceChildren(...shown.map((name) => make("section", {}, make("h2", { textContent: name }), ...groups.get(name))));
  filter();
}

function filter() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const one of document.querySelectorAll(".operation")) {
    one.hidden = !words.every((word) => one.dataset.words.includes(word));
    count += !one.hidden;
  }
  for (const section of document.querySelectorAll("#paths section")) section.hidden = !section.querySelector(".operation:not([hidden])");
  $("state").textContent = `${count} operations`;
}

$("filter").oninput = filter;
document.addEventListener("key", load);
load();
