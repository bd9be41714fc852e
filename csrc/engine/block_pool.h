// The blocks of one group: reference counts, and which free blocks still hold something worth finding again. A block
// with references belongs to sequences; one without is either empty or cached, and cached ones are taken last, those
// unused for longest first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quartz::engine {

class BlockPool {
 public:
  explicit BlockPool(int64_t num_blocks);

  // A block with one reference, -1 if all are referenced. If it was cached, `*evicted` is the node of the prefix tree
  // that must forget it, else -1.
  int32_t allocate(int32_t* evicted);
  void acquire(int32_t block);  // one more reference, also of a cached block that had none
  void release(int32_t block);

  // Cached in `node` of the prefix tree (-1: no more).
  void set_node(int32_t block, int32_t node);
  int32_t node(int32_t block) const { return node_[static_cast<size_t>(block)]; }
  int32_t references(int32_t block) const { return references_[static_cast<size_t>(block)]; }

  int64_t size() const { return static_cast<int64_t>(references_.size()); }
  int64_t num_empty() const { return static_cast<int64_t>(empty_.size()); }
  int64_t num_cached() const { return num_cached_; }                   // without references
  int64_t num_available() const { return num_empty() + num_cached_; }  // what allocate() can give
  int64_t num_used() const { return size() - num_available(); }
  int32_t oldest_cached() const { return next_[static_cast<size_t>(size())]; }  // size() if none

  // Throws std::logic_error where lists and counts disagree; `expected` are the references held outside.
  void check(const std::vector<int32_t>& expected) const;

 private:
  void unlink(int32_t block);
  void link_last(int32_t block);

  std::vector<int32_t> references_, node_;
  std::vector<int32_t> empty_;        // a stack
  std::vector<int32_t> next_, prev_;  // ring of cached blocks, least recently used first; entry size() is its head
  int64_t num_cached_ = 0;
};

}  // namespace quartz::engine
