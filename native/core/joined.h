// Items of all operations in one array.
#pragma once

#include <initializer_list>
#include <new>

#include "core/operation.h"

namespace pydet {

// One array of all of `lists`; an item of zeros ends it. It is kept for ever: others hold pointers into it.
// (new[] of a count, and vectors, ask for a newer libstdc++ than a wheel may.)
template <class Item> const Item *joined(std::initializer_list<Items<Item>> lists) {
  size_t count = 1;
  for (const Items<Item> &list : lists) count += size_t(list.count);
  auto *const all = static_cast<Item *>(::operator new(count * sizeof(Item)));
  Item *next = all;
  for (const Items<Item> &list : lists)
    for (const Item &item : list) *next++ = item;
  *next = Item();
  return all;
}

}  // namespace pydet
