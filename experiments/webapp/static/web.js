// Waits for the others, sends replies without loading the page, and adds buttons to the steppers. Without it forms do.
"use strict";

const table = document.getElementById("table");
let news = null; // the server's events, while others are waited for

function show(html, focus) {
  const text = document.getElementById("text");
  const draft = text ? text.value : "";
  table.innerHTML = html; // made by our own server, with every text escaped
  prepare();
  const next = document.getElementById("text");
  if (next && !focus) next.value = draft;
  const now = document.getElementById("now"); // the button that stops the game is never chosen for anybody
  (now.querySelector(".reply textarea, .reply button, .ending button, a.main") || now).focus({ preventScroll: true });
  now.scrollIntoView({ block: "nearest" });
}

function prepare() {
  for (const input of table.querySelectorAll(".stepper input")) {
    for (const step of [-1, 1]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = step < 0 ? "−" : "+";
      button.setAttribute("aria-label", (step < 0 ? "fewer " : "more ") + input.name);
      button.addEventListener("click", () => { step < 0 ? input.stepDown() : input.stepUp(); worth(input.form); });
      if (step < 0) input.before(button); else input.after(button);
    }
    input.addEventListener("input", () => worth(input.form));
  }
  for (const form of table.querySelectorAll("form.reply")) form.addEventListener("submit", send);
  const text = document.getElementById("text");
  if (text) text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); text.form.requestSubmit(); }
  });
  const claim = table.querySelector("dialog"), opener = document.getElementById("claims");
  if (claim) {
    claim.close(); // without this script it stands open among the rest
    for (const button of table.querySelectorAll("[data-claim]")) button.hidden = false;
    opener.addEventListener("click", () => { claim.showModal(); worth(claim.querySelector("form")); });
    claim.querySelector("[data-claim]").addEventListener("click", () => claim.close());
  }
  const state = table.querySelector(".state").dataset;
  if (state.state === "waiting" && !news) wait(state.version);
}

function worth(form) {
  let points = 0;
  for (const input of form.querySelectorAll("input[data-worth]")) points += Number(input.value) * Number(input.dataset.worth);
  form.querySelector(".worth").textContent = "worth " + points + (points === 1 ? " point" : " points") + " to you";
}

async function send(event) {
  event.preventDefault();
  const body = new URLSearchParams(new FormData(event.target, event.submitter));
  for (const button of table.querySelectorAll("button")) button.disabled = true;
  try {
    const answer = await fetch(event.target.action, { method: "POST", body, headers: { "x-script": "1" } });
    if (answer.ok || answer.status === 400) show(await answer.text(), answer.ok);
    else { alert(await answer.text()); location.reload(); }
  } catch { // the page stays, and goes on once the server is back
    for (const button of table.querySelectorAll("button")) button.disabled = false;
    alert("The server does not answer. Wait a moment, then try again.");
  }
}

function wait(version) {
  news = new EventSource(table.dataset.live + "?since=" + version);
  news.onmessage = (event) => {
    const html = JSON.parse(event.data), done = !html.includes('data-state="waiting"');
    if (done) { news.close(); news = null; }
    show(html, done);
  };
  news.onerror = () => { if (news.readyState === EventSource.CLOSED) setTimeout(wait, 3000, version); };
}

if (table) prepare();

const again = document.getElementById("again"); // a place in the queue
if (again) setTimeout(() => again.requestSubmit(), 4000);

const curves = document.getElementById("curves");
if (curves) setInterval(async () => { // also of a run that is new, or silent for long: it may go on
  if (document.hidden || curves.querySelector(".state").dataset.state === "finished") return;
  const answer = await fetch(curves.dataset.curves).catch(() => null);
  if (answer && answer.ok) curves.innerHTML = await answer.text();
}, 5000);

// The map of a recorded game of Among Us: a slider over its steps.
const ways = document.querySelector("[data-ways]");
if (ways) {
  const { width, rooms, frames } = JSON.parse(ways.dataset.ways);
  const slider = ways.querySelector("input"), body = ways.querySelector("tbody"), cells = [];
  for (let i = 0; i < rooms.length; i++) {
    if (i % width === 0) body.append(document.createElement("tr"));
    const cell = document.createElement("td");
    body.lastChild.append(cell);
    cells.push(cell);
  }
  const draw = () => {
    const frame = frames[slider.value];
    ways.querySelector(".told").textContent = "step " + frame.step + (frame.text ? ": " + frame.text : "");
    slider.setAttribute("aria-valuetext", "step " + frame.step);
    cells.forEach((cell, i) => {
      const name = document.createElement("small");
      name.textContent = rooms[i];
      cell.replaceChildren(name);
      for (const [who, where] of [...Object.entries(frame.at), ...Object.entries(frame.bodies)]) {
        if (where !== i) continue;
        const tag = document.createElement(who in frame.bodies ? "s" : "span");
        const hue = document.createElement("i");
        hue.className = "hue";
        hue.style.background = who.toLowerCase();
        tag.append(hue, who);
        cell.append(tag);
      }
    });
  };
  slider.addEventListener("input", draw);
  for (const button of ways.querySelectorAll("[data-go]")) button.addEventListener("click", () => {
    Number(button.dataset.go) < 0 ? slider.stepDown() : slider.stepUp();
    draw();
  });
  ways.hidden = false;
  draw();
}
