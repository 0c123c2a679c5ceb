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
  const others = [...files].filter((file) => !KINDS.includes(file.type)).map((file) => file.name);
  for (const file of files) if (KINDS.includes(file.type)) chosen.push(await asUrl(file));
  show();
  $("left-out").textContent = others.length ? `Left out: ${others.join(", ")}. Pictures are PNG, JPEG, WebP or GIF.` : "";
  $("left-out").hidden = !others.length;
  $("prompt").focus();
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
  $("left-out").hidden = true;
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

export const areChosen = () => chosen.length > 0;

/* A message's content for the server. */
export const contentOf = (text, urls) =>
  urls.length ? [...urls.map((url) => ({ type: "image_url", image_url: { url } })), ...(text ? [{ type: "text", text }] : [])] : text;

export const shown = (urls) => {
  const images = urls.map((url, place) => make("img", { src: url, alt: `Picture ${place + 1} of the question` }));
  return images.length ? [make("div", { className: "pictures" }, ...images)] : [];
};

/* Offered only if the model sees. */
export function offer(sees) {
  const button = $("attach");
  const input = $("files");
  const box = $("chat");
  button.hidden = !sees;
  if (!sees) {
    $("prompt").onpaste = box.ondragover = box.ondragleave = box.ondrop = null;
    return;
  }
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
