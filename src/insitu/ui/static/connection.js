// Shows that a page which follows something no longer does: the server or the session has ended.
document.addEventListener("DOMContentLoaded", () => {
  const note = document.getElementById("connection");
  document.body.addEventListener("htmx:sseError", () => { note.hidden = false; });
  document.body.addEventListener("htmx:sseOpen", () => { note.hidden = true; });
});
