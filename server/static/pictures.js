/* Pictures that the next message takes along: by button, drop or paste. They travel as data URLs. */

import { $, make } from "./page.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const chosen = []; // data URLs

const asUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

async function add(files) {
  for (const file of files) if (KINDS.includes(file.type)) chosen.push(await asUrl(file));
  show();
}

function show() {
  const items = chosen.map((url, place) => {
    const remove = make("button", { type: "button", className: "quiet", textContent: "×", title: "Leave this picture out" });
    remove.setAttribute("aria-label", `Leave picture ${place + 1} out`);
    remove.onclick = () => {
      chosen.splice(place, 1);
      show();
      $("prompt").focus();
    };
    return make("li", {}, make("img", { src: url, alt: `Picture ${place + 1}` }), remove);
  });
  $("pictures").replaceChildren(...items);
  $("pictures").hidden = !items.length;
}

/* The chosen pictures, which are not chosen any more. */
export function take() {
  const urls = chosen.splice(0);
  show();
  return urls;
}

export function putBack(urls) {
  chosen.unshift(...urls);
  show();
}

/* A message's content for the server. */
export const contentOf = (text, urls) =>
  urls.length ? [...urls.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }] : text;

export const shown = (urls) => urls.map((url, place) => make("img", { src: url, alt: `Picture ${place + 1} of the question` }));

/* Offered only if the model sees. */
export function offer() {
  const button = $("attach");
  const input = $("files");
  button.hidden = false;
  button.onclick = () => input.click();
  input.onchange = async () => {
    await add(input.files);
    input.value = "";
  };
  $("prompt").onpaste = (event) => {
    const files = [...event.clipboardData.files].filter((file) => KINDS.includes(file.type));
    if (!files.length) return;
    event.preventDefault();
    add(files);
  };
  const box = $("chat");
  box.ondragover = (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    box.classList.add("dropping");
  };
  box.ondragleave = () => box.classList.remove("dropping");
  box.ondrop = (event) => {
    event.preventDefault();
    box.classList.remove("dropping");
    add(event.dataTransfer.files);
  };
}
