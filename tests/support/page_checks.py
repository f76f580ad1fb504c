"""What a page must be for everybody: contrast of texts, and a way through it by the keyboard."""

from __future__ import annotations

from typing import Any

CONTRAST = """
() => {
  const parse = text => {
    const found = text.match(/rgba?\\(([^)]+)\\)/);
    if (!found) return null;
    const [r, g, b, a] = found[1].split(/[ ,/]+/).map(Number);
    return [r, g, b, a === undefined ? 1 : a];
  };
  const over = (top, below) => {
    const mix = i => top[i] * top[3] + below[i] * (1 - top[3]);
    return [mix(0), mix(1), mix(2), 1];
  };
  const light = ([r, g, b]) => {
    const part = c => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ground = element => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      if (colour && colour[3] > 0) { layers.push(colour); if (colour[3] === 1) break; }
    }
    const dark = matchMedia('(prefers-color-scheme: dark)').matches;
    const paper = dark ? [18, 18, 18, 1] : [255, 255, 255, 1];
    return layers.reverse().reduce((below, top) => over(top, below), paper);
  };
  const poor = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  const check = (element, text, colour) => {
    const style = getComputedStyle(element);
    const box = element.getBoundingClientRect();
    if (style.visibility === 'hidden' || !box.width || !box.height) return;
    if (element.closest('.hidden, .skip')) return;
    const below = ground(element), top = over(colour, below);
    const a = light(top), b = light(below), ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize), bold = parseInt(style.fontWeight) >= 700;
    const least = size >= 24 || (bold && size >= 18.66) ? 3 : 4.5;
    count += 1;
    const kind = element.className.baseVal ?? element.className;
    if (ratio < least) poor.push(`${ratio.toFixed(2)} ${element.tagName}.${kind}: ${text.slice(0, 40)}`);
  };
  while (texts.nextNode()) {
    const text = texts.currentNode.textContent.trim(), element = texts.currentNode.parentElement;
    if (!text || !element || ['SCRIPT', 'STYLE', 'TITLE', 'OPTION'].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    check(element, text, parse(element.closest('svg') ? style.fill : style.color) || [0, 0, 0, 1]);
  }
  for (const each of document.querySelectorAll('input, select, textarea, button'))
    check(each, each.name || each.textContent, parse(getComputedStyle(each).color));
  return [count, [...new Set(poor)]];
}
"""
"""Counts the texts that are seen, and lists those whose contrast is below that of WCAG 2 AA."""

FOCUS = """
() => {
  const at = document.activeElement;
  if (!at || at === document.body) return null;
  const style = getComputedStyle(at), box = at.getBoundingClientRect();
  return {
    name: (at.getAttribute('aria-label') || at.textContent || at.id || at.tagName).trim().slice(0, 40),
    ring: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
    seen: box.width > 0 && box.bottom > 0 && box.top < innerHeight,
    fields: at.id || at.name || '',
  };
}
"""


def find_poor_contrast(page: Any) -> tuple[int, list[str]]:
    """Return (how many texts were looked at, those that are hard to read)."""
    count, poor = page.evaluate(CONTRAST)
    return int(count), list(poor)


def walk_by_keyboard(page: Any, most: int = 200) -> list[dict[str, Any]]:
    """Press Tab from the top of the page to its end. Return what had the focus, in order."""
    page.evaluate("document.activeElement && document.activeElement.blur()")
    found = []
    for _ in range(most):
        page.keyboard.press("Tab")
        at = page.evaluate(FOCUS)
        if at is None:
            break
        found.append(at)
    return found
