(() => {
  "use strict";
  const root = document.documentElement, tip = document.getElementById("tip");
  const keep = (key, value) => { try { localStorage.setItem(key, value); } catch { /* file:// may forbid it */ } };
  const kept = (key) => { try { return localStorage.getItem(key); } catch { return null; } };

  // hints: one box for all marks, by pointer and by keyboard
  const show = (mark, x, y) => {
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const above = y - tip.offsetHeight - 14;
    tip.style.left = `${Math.max(8, Math.min(x + 12, room)) + scrollX}px`;
    tip.style.top = `${(above > 4 ? above : y + 18) + scrollY}px`;
  };
  const hide = () => { tip.hidden = true; };
  const marked = (event) => event.target.closest && event.target.closest("[data-tip]");
  document.addEventListener("pointermove", (event) => {
    const mark = marked(event);
    if (mark) show(mark, event.clientX, event.clientY); else if (event.pointerType === "mouse") hide();
  });
  document.addEventListener("pointerdown", (event) => {
    const mark = marked(event);
    if (mark) show(mark, event.clientX, event.clientY); else hide();
  });
  document.addEventListener("focusin", (event) => {
    const mark = marked(event);
    if (!mark) return hide();
    const box = mark.getBoundingClientRect();
    show(mark, box.right, box.top);
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // light and dark
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (["light", "dark"].includes(kept("replearn-theme"))) root.dataset.theme = kept("replearn-theme");
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    keep("replearn-theme", root.dataset.theme);
  });

  // a closed section is only laid out when it is opened
  const unpack = (section) => {
    const held = section.querySelector(":scope > template");
    if (held) held.replaceWith(held.content);
  };
  document.addEventListener("toggle", (event) => {
    if (event.target.open && event.target.matches(".comparison")) unpack(event.target);
  }, true);
  const reach = () => {
    const section = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (section && section.matches("details")) { unpack(section); section.open = true; section.scrollIntoView(); }
  };
  addEventListener("hashchange", reach);
  reach();

  // filter: every word must occur
  const filter = document.getElementById("filter");
  const sift = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const part of document.querySelectorAll("[data-words]"))
      part.hidden = !words.every((word) => part.dataset.words.includes(word));
    for (const row of document.querySelectorAll("section.card tbody tr"))
      row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    for (const card of document.querySelectorAll("section.card"))
      card.hidden = words.length > 0 && !card.querySelector("article:not([hidden]), tbody tr:not([hidden])");
    const found = document.querySelector(".comparison:not([hidden]), section.card tbody tr:not([hidden])");
    document.getElementById("nothing").hidden = !words.length || !!found;
  };
  filter.addEventListener("input", sift);

  document.addEventListener("click", async (event) => {
    if (!event.target.matches(".copy")) return;
    const code = event.target.previousElementSibling;
    try { await navigator.clipboard.writeText(code.textContent); event.target.textContent = "copied"; } catch {
      getSelection().selectAllChildren(code);  // no clipboard here: leave it selected
      event.target.textContent = "selected";
    }
    setTimeout(() => { event.target.textContent = "copy"; }, 1500);
  });

  // live: ask for the page again, and exchange its parts where they stand
  const every = Number(document.body.dataset.live), status = document.getElementById("live");
  if (!every) return;
  let mark = null;
  const path = (element) => {  // where a fold is: by id, or by its summary's text below the nearest id
    if (element.id) return element.id;
    const above = element.parentElement.closest("[id]");
    return `${above ? above.id : ""}/${element.querySelector("summary").textContent.replace(/\d+/g, "#")}`;
  };
  const refresh = async () => {
    if (document.hidden) return;
    try {
      const answer = await fetch(location.pathname, { headers: mark ? { "If-None-Match": mark } : {}, cache: "no-store" });
      if (answer.status === 304) { status.textContent = `live, nothing new at ${new Date().toLocaleTimeString()}`; return; }
      if (!answer.ok) throw new Error(answer.status);
      mark = answer.headers.get("ETag");
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = new Map([...document.querySelectorAll("details")].map((fold) => [path(fold), fold.open]));
      const place = scrollY, focus = document.activeElement && document.activeElement.id;
      const sideways = [...document.querySelectorAll("main .scroll")].map((box) => box.scrollLeft);
      for (const section of fresh.querySelectorAll(".comparison")) if (open.get(section.id)) unpack(section);
      for (const fold of fresh.querySelectorAll("main details")) if (open.has(path(fold))) fold.open = open.get(path(fold));
      document.querySelector("main").replaceWith(fresh.querySelector("main"));
      document.querySelector(".facts").replaceWith(fresh.querySelector(".facts"));
      document.querySelectorAll("main .scroll").forEach((box, index) => { box.scrollLeft = sideways[index] || 0; });
      sift();
      hide();
      scrollTo(0, place);
      if (focus && document.getElementById(focus)) document.getElementById(focus).focus({ preventScroll: true });
      status.textContent = `live, changed at ${new Date().toLocaleTimeString()}`;
    } catch { status.textContent = "the server does not answer; this is the last state seen"; }
  };
  setInterval(refresh, 1000 * every);
})();
