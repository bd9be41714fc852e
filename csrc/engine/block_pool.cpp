#include "engine/block_pool.h"

#include <stdexcept>
#include <string>

namespace quartz::engine {

BlockPool::BlockPool(int64_t num_blocks)
    : references_(static_cast<size_t>(num_blocks), 0),
      node_(static_cast<size_t>(num_blocks), -1),
      next_(static_cast<size_t>(num_blocks) + 1, -1),
      prev_(static_cast<size_t>(num_blocks) + 1, -1) {
  empty_.reserve(static_cast<size_t>(num_blocks));
  for (int64_t block = num_blocks; block-- > 0;) empty_.push_back(static_cast<int32_t>(block));
  next_.back() = prev_.back() = static_cast<int32_t>(num_blocks);
}

int32_t BlockPool::allocate(int32_t* evicted) {
  *evicted = -1;
  int32_t block;
  if (!empty_.empty()) {
    block = empty_.back();
    empty_.pop_back();
  } else if (num_cached_ > 0) {
    block = oldest_cached();
    unlink(block);
    *evicted = node_[static_cast<size_t>(block)];
    node_[static_cast<size_t>(block)] = -1;
  } else {
    return -1;
  }
  references_[static_cast<size_t>(block)] = 1;
  return block;
}

void BlockPool::acquire(int32_t block) {
  if (references_[static_cast<size_t>(block)]++ == 0) unlink(block);
}

void BlockPool::release(int32_t block) {
  if (--references_[static_cast<size_t>(block)] > 0) return;
  if (node_[static_cast<size_t>(block)] >= 0) {
    link_last(block);
  } else {
    empty_.push_back(block);
  }
}

void BlockPool::set_node(int32_t block, int32_t node) {
  const bool was_cached = node_[static_cast<size_t>(block)] >= 0;
  node_[static_cast<size_t>(block)] = node;
  if (references_[static_cast<size_t>(block)] > 0) return;
  if (was_cached && node < 0) {
    unlink(block);
    empty_.push_back(block);
  }
}

void BlockPool::unlink(int32_t block) {
  const int32_t next = next_[static_cast<size_t>(block)], prev = prev_[static_cast<size_t>(block)];
  next_[static_cast<size_t>(prev)] = next;
  prev_[static_cast<size_t>(next)] = prev;
  next_[static_cast<size_t>(block)] = prev_[static_cast<size_t>(block)] = -1;
  --num_cached_;
}

void BlockPool::link_last(int32_t block) {
  const auto head = static_cast<int32_t>(size());
  const int32_t last = prev_[static_cast<size_t>(head)];
  next_[static_cast<size_t>(last)] = block;
  prev_[static_cast<size_t>(block)] = last;
  next_[static_cast<size_t>(block)] = head;
  prev_[static_cast<size_t>(head)] = block;
  ++num_cached_;
}

void BlockPool::check(const std::vector<int32_t>& expected) const {
  const auto fail = [](const std::string& what, int64_t block) {
    throw std::logic_error("quartz: BlockPool.check: block " + std::to_string(block) + ": " + what);
  };
  std::vector<char> seen(references_.size(), 0);
  for (const int32_t block : empty_) {
    const auto b = static_cast<size_t>(block);
    if (seen[b]++ != 0) fail("twice among the empty blocks", block);
    if (references_[b] != 0 || node_[b] >= 0) fail("empty, but referenced or cached", block);
  }
  int64_t cached = 0;
  for (int32_t block = oldest_cached(); block != static_cast<int32_t>(size());
       block = next_[static_cast<size_t>(block)]) {
    const auto b = static_cast<size_t>(block);
    if (seen[b]++ != 0) fail("in two lists", block);
    if (references_[b] != 0 || node_[b] < 0) fail("among the cached, but referenced or without a node", block);
    ++cached;
  }
  if (cached != num_cached_) fail("the count of cached blocks is " + std::to_string(num_cached_), cached);
  for (size_t b = 0; b < references_.size(); ++b) {
    if (references_[b] != expected[b]) {
      fail("has " + std::to_string(references_[b]) + " references, " + std::to_string(expected[b]) + " are known",
           static_cast<int64_t>(b));
    }
    if (references_[b] == 0 && seen[b] == 0) fail("leaked: neither referenced nor free", static_cast<int64_t>(b));
  }
}

}  // namespace quartz::engine
