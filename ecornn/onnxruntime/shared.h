// What nodes have in common: one module of each file, and one layer where weights are equal, in all sessions of a process.
#ifndef ECORNN_ORT_SHARED_H_
#define ECORNN_ORT_SHARED_H_

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "ecornn.hpp"
#include "tensors.h"

namespace ort {

// Things by keys, each as long as somebody has it. Lives as long as the process.
template <typename Key, typename Thing>
class Shared {
 public:
  // The one of a key, or else what `make` makes, which is a new Thing. Raises what that does.
  template <typename Make>
  std::shared_ptr<const Thing> Of(const Key& key, Make make) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = known_.find(key);
    if (known != known_.end()) {
      if (std::shared_ptr<const Thing> found = known->second.lock()) return found;
    }
    std::shared_ptr<const Thing> made(make(), [this, key](const Thing* thing) {
      delete thing;
      const std::lock_guard<std::mutex> end(mutex_);
      const auto old = known_.find(key);
      if (old != known_.end() && old->second.expired()) known_.erase(old);
    });
    known_[key] = made;
    return made;
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::weak_ptr<const Thing>> known_;
};

// A layer, and the module that it needs.
struct Bound {
  std::shared_ptr<const ecornn::Module> module;
  ecornn::Layer layer;
};

using Content = std::vector<uint64_t>;

// Adds an array of the host to what is equal for equal ones: of its bytes a hash of 64 bits.
inline void Add(Content* content, const Array& array) {
  content->push_back(static_cast<uint64_t>(array.type));
  content->insert(content->end(), array.shape.begin(), array.shape.end());
  content->push_back(std::hash<std::string_view>{}({static_cast<const char*>(array.data), array.bytes()}));
}

}  // namespace ort

#endif  // ECORNN_ORT_SHARED_H_
