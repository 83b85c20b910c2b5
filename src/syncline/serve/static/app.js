// The page of a served model: what it takes, what it answers, its versions, how fast and how busy it is.

import { showInputs } from "/page/inputs.js";
import { showOutputs } from "/page/outputs.js";
import { el, fill, number, seconds } from "/page/words.js";

const $ = (id) => document.getElementById(id);
const LOOK_MILLISECONDS = 1000;
let fields = [], outputs = [], labels = [], last = null, known = "", modelName = "";

const kept = (store) => ({
  get: (name) => { try { return store().getItem(name); } catch { return null; } },
  set: (name, value) => { try { store().setItem(name, value); } catch { /* a private window */ } },
});
const settings = kept(() => localStorage), session = kept(() => sessionStorage);
if (settings.get("theme")) document.documentElement.dataset.theme = settings.get("theme");
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  settings.set("theme", root.dataset.theme);
});

async function ask(path, body) {
  const token = session.get("token");
  const headers = { ...(token ? { Authorization: `Bearer ${token}` } : {}), ...(body ? { "Content-Type": "application/json" } : {}) };
  const reply = await fetch(path, { method: body ? "POST" : "GET", headers, body, cache: "no-store" });
  const content = await reply.json();
  if (reply.status === 401) $("token-form").hidden = false;
  if (!reply.ok) throw Object.assign(new Error(content.error ?? `status ${reply.status}`), { status: reply.status });
  return content;
}

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  session.set("token", $("token").value.trim());
  $("token").value = "";
  $("token-form").hidden = true;
  begin();
});

// A link sends no token: what it leads to is fetched, and shown as text.
for (const link of document.querySelectorAll("footer a")) {
  link.addEventListener("click", async (event) => {
    const token = session.get("token");
    if (!token) return;
    event.preventDefault();
    const reply = await fetch(link.getAttribute("href"), { headers: { Authorization: `Bearer ${token}` } });
    location.assign(URL.createObjectURL(new Blob([await reply.text()], { type: "text/plain" })));
  });
}

function say(words) {
  fill($("notices"), ...(words ? [el("div", { class: "notice bad" }, el("span", { class: "mark" }, "!"), el("div", {}, words))] : []));
}

function state(words, kind) {
  $("state").textContent = words;
  $("state").className = `chip ${kind}`;
}

// -- the model ------------------------------------------------------------------------------------------

async function begin() {
  try {
    const status = await ask("/status");
    labels = status.labels;
    modelName = status.name;
    const model = await ask(`/v2/models/${encodeURIComponent(status.name)}`);
    document.title = `${model.name} · Syncline`;
    outputs = model.outputs;
    $("name").textContent = model.name;
    $("model").textContent = `POST /v2/models/${model.name}/infer`;
    fields = showInputs($("inputs"), model.inputs);
    $("try").hidden = false;
    show(status);
    say("");
  } catch (error) {
    if (error.status === 401) state("needs a token", "warn");
    else away(error);
    if (error.status === 401 && session.get("token")) say("The server does not take this token.");
  }
  document.body.dataset.ready = "";
}

$("request").addEventListener("submit", async (event) => {
  event.preventDefault();
  let content;
  try {
    const row = Object.fromEntries(fields.map((field) => [field.spec.name, field.value()]));
    content = { input: row };
    if ($("version").value) content.version = $("version").value;
  } catch (error) {
    return say(error.message);
  }
  $("send").disabled = true;
  $("answer").classList.add("waits");
  const began = performance.now();
  try {
    const answer = await ask("/predict", JSON.stringify(content));
    const took = (performance.now() - began) / 1000;
    $("by").textContent = `version ${answer.model_version}, ${seconds(took)} with the way here`;
    showOutputs($("outputs"), answer.output, labels, outputs);
    $("raw").hidden = false;
    $("raw").querySelector("pre").textContent = JSON.stringify(answer, null, 1).slice(0, 20_000);
    say("");
  } catch (error) {
    say(error.message);
  }
  $("send").disabled = false;
  $("answer").classList.remove("waits");
});

// -- how it stands --------------------------------------------------------------------------------------

function away(error) {
  state("no answer", "bad");
  if (!last) say(`The server does not answer: ${error.message}`);
}

async function look() {
  if (!document.hidden && $("token-form").hidden) {
    try {
      if (modelName) show(await ask("/status")); else await begin();
    } catch (error) { away(error); }
  }
  setTimeout(look, LOOK_MILLISECONDS);
}

function show(status) {
  const now = performance.now() / 1000;
  const rate = last ? Math.max(0, status.num_answered - last.num_answered) / Math.max(0.2, now - last.at) : null;
  const rows = status.num_batches ? status.num_rows / status.num_batches : null;
  last = { ...status, at: now };
  state("answers", "live");
  fill($("tiles"),
    tile("version", status.current || "–", status.is_pinned ? "pinned" : status.canary ? `${status.canary} gets ${number(100 * status.share)} %` : "answers all"),
    tile("50 % within", status.num_answered ? seconds(status.p50_seconds) : "–", "on the server"),
    tile("99 % within", status.num_answered ? seconds(status.p99_seconds) : "–", "on the server"),
    tile("queue", number(status.num_queued), `${number(status.num_connections)} connections`),
    tile("answers", number(status.num_answered), rate === null ? `${number(status.num_refused)} refused` : `${number(Math.round(rate))} per second, ${number(status.num_refused)} refused`),
    tile("rows of a batch", rows === null ? "–" : number(rows), `${number(status.num_batches)} batches`));
  const names = status.versions.map((one) => one.name).reverse();
  if (names.join() !== known) {
    const chosen = $("version").value;
    known = names.join();
    fill($("version"), el("option", { value: "" }, "that answers"), ...names.map((name) => el("option", { value: name }, name)));
    if (names.includes(chosen)) $("version").value = chosen;
  }
  fill($("versions").tBodies[0], ...[...status.versions].reverse().map((one) => el("tr", {}, el("td", { class: "text" }, one.name), el("td", {}, number(one.step)), el("td", { class: "text" }, tag(one.name, status)))));
}

function tag(name, status) {
  if (name === status.current) return el("span", { class: "tag" }, status.is_pinned ? "answers, pinned" : "answers");
  if (name === status.canary) return el("span", { class: "tag warn" }, `canary, ${number(100 * status.share)} %`);
  return "in memory";
}

function tile(label, value, under) {
  return el("div", { class: "tile" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value), el("div", { class: "under", title: under }, under));
}

await begin();
setTimeout(look, LOOK_MILLISECONDS);
