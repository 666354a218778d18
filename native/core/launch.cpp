// What the choice of a kernel needs of all tables.

#include "core/launch.h"

namespace pydet {

bool kernel_exists(const char *name) {
  bool found = false;
  each_kernel([&](const Backend &, const char *, const auto &row) { found |= strcmp(row.name, name) == 0; });
  return found;
}

Text feature_list(uint64_t features) {
  Text out = {"more than any release has"};  // where no feature has a name
  size_t used = 0;
  for (const FeatureRow &row : kFeatures)
    if (features & row.feature && used < sizeof out.text)
      used += size_t(snprintf(out.text + used, sizeof out.text - used, "%s%s", used ? ", " : "", row.name));
  return out;
}

}  // namespace pydet

const char *pydet_last_kernel(void) { return pydet::last_kernel; }
