/**
 * Small help with the document.
 */

/**
 * @param {string} id
 * @returns {HTMLElement}
 */
export function find(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found;
}

/**
 * @param {HTMLElement} element
 * @param {string} text
 */
export function setText(element, text) {
  // Unchanged text is left alone: assistive technology hears every write.
  if (element.textContent !== text) element.textContent = text;
}
