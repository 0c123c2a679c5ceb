import { $, askForKey, call, hideTip, make, served, showTip } from "./page.js";
import * as pictures from "./pictures.js";
import { draw, look } from "./pool.js";

const visible = (text) => JSON.stringify(text).slice(1, -1).replace(/\\"/g, '"').replace(/ /g, "·") || "∅";
const percent = (logprob) => {
  const p = 100 * Math.exp(logprob);
  return p >= 99.95 ? "100%" : p >= 0.1 ? `${p.toFixed(1)}%` : "<0.1%";
};

/* One answer: its text in spans by token, each with what the model thought of it */

class Answer {
  constructor(model) {
    this.text = "";
    this.reasoning = null;
    this.pending = ""; // text that no token has been found for yet
    this.tokens = []; // those whose text has not been met yet
    this.decoder = new TextDecoder();
    this.body = make("div", { className: "text", tabIndex: 0 });
    this.body.setAttribute("aria-label", "Answer; arrow keys go through its tokens");
    this.facts = make("p", { className: "facts" });
    this.node = make("article", { className: "message assistant busy" }, make("p", { className: "who", textContent: model }), this.body, this.facts);
    this.body.onkeydown = (event) => this.walk(event);
    this.body.onblur = () => this.select(null);
    this.body.onpointerover = (event) => this.select(event.target.closest(".token"));
    this.body.onpointerleave = () => this.select(null);
    this.body.onclick = (event) => this.select(event.target.closest(".token"));
  }

  think(text) {
    if (!this.reasoning) this.body.before((this.reasoning = make("div", { className: "reasoning" })));
    this.reasoning.append(text);
  }

  add(text, tokens) {
    this.text += text;
    this.pending += text;
    this.tokens.push(...tokens);
    while (this.tokens.length) {
      const [token] = this.tokens;
      token.text ??= this.decoder.decode(new Uint8Array(token.bytes ?? []), { stream: true });
      if (this.pending.startsWith(token.text)) {
        if (token.text) this.body.append(this.span(token));
        this.pending = this.pending.slice(token.text.length);
      } else if (token.text.startsWith(this.pending)) {
        break; // the rest of it is still to come
      } // else: it is not in the text, as the token that ends it
      this.tokens.shift();
    }
    if (!tokens.length && !this.tokens.length) this.flush();
  }

  flush() {
    this.body.append(this.pending);
    this.pending = "";
  }

  span(token) {
    const span = make("span", { className: "token", textContent: token.text });
    span.style.setProperty("--surprise", (1 - Math.exp(token.logprob)).toFixed(2));
    span.classList.toggle("accepted", token.accepted === true);
    span.token = token;
    return span;
  }

  walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.select(null);
    if (!step) return;
    event.preventDefault();
    const spans = [...this.body.querySelectorAll(".token")];
    const now = spans.indexOf(this.selected);
    this.select(spans[Math.min(Math.max(now + step, 0), spans.length - 1)]);
  }

  select(span) {
    this.selected?.classList.remove("on");
    this.selected = span;
    if (!span) return hideTip();
    span.classList.add("on");
    const { token } = span;
    const options = token.top_logprobs.map((option) => [option.token, option.logprob]);
    if (!options.some(([text]) => text === token.token)) options.push([token.token, token.logprob]);
    const rows = options.map(([text, logprob]) => {
      const row = make("tr", { className: text === token.token ? "chosen" : "" }, make("td", { textContent: visible(text) }), make("td", { textContent: percent(logprob) }));
      row.style.setProperty("--share", `${100 * Math.exp(logprob)}%`);
      return row;
    });
    const parts = [make("div", { className: "head" }, make("span", { textContent: visible(token.token) }), make("span", { textContent: percent(token.logprob) }))];
    if (token.accepted) parts.push(make("p", { textContent: "Proposed by speculation, and kept" }));
    showTip(span.getClientRects()[0], ...parts, make("table", {}, ...rows));
  }

  finish(facts) {
    this.flush();
    this.node.classList.remove("busy");
    this.facts.textContent = facts;
  }
}

/* The conversation */

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (buffer + part.value).split("\n\n");
    buffer = lines.pop();
    for (const line of lines) {
      if (line.startsWith(":")) continue; // a comment, which keeps the connection alive
      const data = line.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

const chat = { history: [], running: null, answer: null };
const form = $("composer");

function settings() {
  const given = {};
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    if (form.elements[name].value !== "") given[name] = form.elements[name].valueAsNumber;
  }
  return given;
}

form.oninput = () => {
  const words = Object.entries(settings()).map(([name, value]) => `${name} ${value}`);
  $("sampling-summary").textContent = words.join(", ") || "the model’s defaults";
};

async function send(text, urls) {
  const system = form.elements.system.value;
  const logprobs = form.elements.logprobs.checked;
  $("intro")?.remove();
  const question = make("div", { className: "message user" }, make("div", { className: "text" }, ...pictures.shown(urls), text));
  const answer = new Answer(served.model);
  chat.answer = answer;
  const box = $("messages");
  box.append(question, answer.node);
  box.scrollTop = box.scrollHeight;
  box.setAttribute("aria-busy", "true");
  chat.history.push({ role: "user", content: pictures.contentOf(text, urls) });
  chat.running = new AbortController();
  setSending(true);
  const begin = performance.now();
  let first = 0, usage = null, reason = "stopped";
  try {
    const messages = system ? [{ role: "system", content: system }, ...chat.history] : chat.history;
    const body = { model: served.model, messages, stream: true, stream_options: { include_usage: true }, ...settings() };
    if (logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5, return_accepted_proposals: true });
    const answered = call("v1/chat/completions", body, chat.running.signal);
    if (served.several) look(); // a model that must start says so
    const response = await answered;
    answer.facts.textContent = "";
    look();
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const [choice] = chunk.choices;
      if (!choice) continue;
      const { content, reasoning, reasoning_content } = choice.delta;
      const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
      if (reasoning ?? reasoning_content) answer.think(reasoning ?? reasoning_content);
      answer.add(content ?? "", choice.logprobs?.content ?? []);
      if (content && !first) first = performance.now();
      reason = choice.finish_reason ?? reason;
      if (atEnd) box.scrollTop = box.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      answer.node.append(make("p", { className: "error", textContent: error.message }));
      box.scrollTop = box.scrollHeight;
      if (error.status === 401) askForKey();
      reason = "failed";
    }
  }
  const seconds = (performance.now() - (first || begin)) / 1000;
  const count = usage?.completion_tokens;
  const facts = [reason, first && `first token after ${Math.round(first - begin)} ms`];
  if (count > 1) facts.unshift(`${count} tokens`, `${((count - 1) / seconds).toFixed(0)} per second`);
  if (usage?.prompt_tokens_details?.cached_tokens) facts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached`);
  const kept = answer.body.querySelectorAll(".accepted").length;
  if (kept) facts.splice(2, 0, `${kept} accepted proposals`);
  answer.finish(facts.filter(Boolean).join(" · "));
  if (answer.text) chat.history.push({ role: "assistant", content: answer.text });
  else {
    chat.history.pop();
    if (!$("prompt").value) $("prompt").value = text;
    pictures.putBack(urls);
  }
  box.setAttribute("aria-busy", "false");
  chat.running = null;
  chat.answer = null;
  setSending(false);
}

document.addEventListener("status", ({ detail }) => {
  if (served.several && chat.answer && !chat.answer.text) chat.answer.facts.textContent = detail === "ready" ? "" : `${served.model}: ${detail}`;
});

function setSending(sending) {
  $("send").textContent = sending ? "Stop" : "Send";
  $("send").classList.toggle("stop", sending);
}

form.onsubmit = (event) => {
  event.preventDefault();
  if (chat.running) return chat.running.abort();
  const text = $("prompt").value.trim();
  if (!(text || pictures.areChosen()) || !form.reportValidity()) return;
  $("prompt").value = "";
  send(text, pictures.take());
};

$("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!chat.running) form.requestSubmit();
};

$("clear").onclick = () => {
  chat.running?.abort();
  chat.history = [];
  $("messages").replaceChildren();
  $("prompt").focus();
};

for (const button of document.querySelectorAll("[data-show]")) {
  button.onclick = () => {
    document.body.dataset.view = button.dataset.show;
    for (const other of document.querySelectorAll("[data-show]")) other.setAttribute("aria-pressed", String(other === button));
    draw();
  };
}

const label = ({ id, state }) => (state === "ready" ? id : `${id} · ${state}`);

document.addEventListener("models", ({ detail }) => {
  const options = $("model").querySelectorAll("option");
  for (const model of detail) {
    for (const option of options) if (option.value === model.id) option.textContent = label(model);
    if (model.id === served.model) pictures.offer(model.modalities?.includes("image"));
  }
});

async function begin() {
  try {
    const models = (await (await call("v1/models")).json()).data.filter((model) => model.state === undefined || model.id === model.root || model.parent);
    served.several = models[0].state !== undefined;
    const choose = (model) => {
      served.model = model.id;
      pictures.offer(model.modalities?.includes("image"));
      document.title = `${model.id} – jaxserve`;
      if (served.several) look();
    };
    choose(models[0]);
    if (!served.several) return ($("model").textContent = served.model);
    const list = make("select", { ariaLabel: "Model", onchange: () => choose(models[list.selectedIndex]) });
    list.append(...models.map((model) => make("option", { value: model.id, textContent: label(model) })));
    $("model").replaceChildren(list);
  } catch {} // pool.js says what is wrong
}

document.addEventListener("key", begin);
begin();
