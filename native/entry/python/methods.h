// What an operation gives to Python: its methods and their arguments.
#pragma once

#include "entry/python/results.h"

namespace pydet {

// Declares the members of a struct of arguments, all of them objects, and their names: the first are positional.
using Argument = Object *;
#define PYDET_ARGUMENTS(...) \
  Argument __VA_ARGS__;      \
  static constexpr char kNames[] = #__VA_ARGS__

// The names of a struct's members as Python's strings, once the binding has filled them in.
template <class Arguments> inline Object *names_of[sizeof(Arguments) / sizeof(Argument)];

using Method = Object *(Object *self, Object *const *args, intptr_t count, Object *keywords);

template <class Arguments> constexpr pydet_exchange_method method(const char *name, Method *call) {
  return {name, call, kFastCallKeywords, nullptr, Arguments::kNames, names_of<Arguments>};
}

}  // namespace pydet
